"""Configuration of the gateway."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.address import is_loopback
from services.common.config import like
from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.core.service import ServiceClass
from services.core.setting import (
    choice,
    mapping,
    mappings,
    nested,
    number,
    option,
    served_name,
    size,
    tcp_port,
)
from services.gateway.batches.settings import BatchSettings
from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.model.settings import ModelSettings, models_of
from services.gateway.vocabulary.class_targets import class_targets

ADMIN_KEY_MIN = 16
_MODEL_DEFAULTS = (
    *("expected_workers", "generation_config"),
    *("tool_format", "reasoning_format", "user_special_tokens"),
)
"""Keys that are defaults for each model."""


def exposure_warning(http_host: str, grpc_host: str | None, keyed: bool) -> str | None:
    """A warning if the network can use HTTP or gRPC without a key; `grpc_host` None: no gRPC."""
    hosts = {"HTTP": http_host, "gRPC": grpc_host}
    open_ports = [
        f"{protocol} on {host or 'all addresses'}"
        for protocol, host in hosts.items()
        if host is not None and not is_loopback(host)
    ]
    if keyed or not open_ports:
        return None
    return (
        f"{' and '.join(open_ports)} may be used without a key by every client that reaches it;"
        " require keys with --api-keys ('api_keys_file' of the gateway)"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """The settings of the gateway."""

    model_name: str | None = served_name(
        "Model name in requests. Required, with 'model_dir', unless 'models' is set.", None
    )
    model_dir: Path | None = option(None, "Folder with config.json and tokenizer.json.")
    model_aliases: str = option("", "Further model names in requests, separated by commas.")
    models: tuple[dict[str, Any], ...] = mappings(
        "Models to serve, instead of 'model_name' and 'model_dir'. Each is a mapping with name, dir"
        " and optionally aliases (a list), quota_weight (tokens of a quota that a token of the"
        " model costs, default 1), expected_workers, generation_config, tool_format,"
        " reasoning_format and user_special_tokens. The keys outside 'models' are defaults of the"
        " last five."
    )
    ready_models: str = choice(
        "any",
        ("any", "all"),
        "Models of 'models' that must be ready before /ready succeeds; /ready?model=NAME asks for a"
        " single model.",
    )
    generation_config: str = like(ModelSettings, "generation_config")
    host: str = option(
        "127.0.0.1", "Listening address for HTTP; 0.0.0.0 exposes it to the network."
    )
    port: int = tcp_port(8000, "HTTP port; 0: any free port.")
    http_tls_cert_file: Path | None = option(
        None,
        "Certificate for HTTPS, reloaded on change; unset: plain HTTP. The admin port uses it as"
        " well, unless its address is a loopback address.",
    )
    http_tls_key_file: Path | None = option(None, "Private key of the HTTPS certificate.")
    keep_alive_s: float = number(
        75.0,
        "Seconds that an idle HTTP connection stays open. Set it longer than the idle timeout of"
        " proxies and clients (nginx and AWS load balancers 60 s, Go clients 90 s); otherwise they"
        " send requests on closing connections. Applies to the admin port as well.",
        minimum=1,
        maximum=3600,
    )
    connections_per_address_max: int | None = number(
        None,
        "Maximum connections of an IPv4 address or IPv6 /64 network, over HTTP and gRPC; a gRPC"
        " connection counts as three. Unset: half of all connections, whose limit follows from the"
        " limit of open files. Behind a proxy all clients have its address.",
        minimum=4,
        maximum=1_000_000,
    )
    grpc_host: str = option("127.0.0.1", "Listening address for internal gRPC between services.")
    grpc_port: int = tcp_port(0, "Port for internal gRPC between services; 0: any free port.")
    public_grpc_host: str = option(
        "127.0.0.1", "Listening address for gRPC clients; 0.0.0.0 exposes it to the network."
    )
    public_grpc_port: int | None = tcp_port(
        None, "Port for gRPC clients; unset: no gRPC for clients, 0: any free port."
    )
    public_grpc_ca_file: Path | None = option(
        None,
        "CA of client certificates: gRPC clients must present a certificate that it signed; unset:"
        " they need none. The server uses the HTTPS certificate.",
    )
    public_grpc_reflection: bool = option(
        True, "Whether to serve gRPC server reflection, for tools such as grpcurl."
    )
    expected_workers: int | None = like(ModelSettings, "expected_workers")
    expected_wait_s: float = number(
        60.0,
        "Maximum seconds that /ready waits for `expected_workers` once a request can be scheduled.",
        minimum=0,
        maximum=86400,
        expert=True,
    )
    api_key: str | None = option(
        None, "An API key without owner and limits; see also 'api_keys_file'.", secret=True
    )
    api_keys_file: Path | None = option(
        None,
        "File with API and admin keys, their owners and limits, as written by `tideserve key`;"
        " reloaded on change.",
    )
    cors_origins: str = option(
        "",
        "Origins of web pages that may use the API (CORS), separated by commas, such as"
        " https://app.example; * for all.",
    )
    adapter_roots: tuple[str, ...] = option(
        (),
        "Folders below which LoRA adapters may lie, as the workers see them; none: the admin port"
        " loads no adapters.",
        default_text="none",
    )
    public_metrics: bool = option(
        True, "Whether the HTTP port also serves this gateway's /metrics."
    )
    admin_host: str = option(
        "127.0.0.1", "Listening address of the admin port: live page, status, merge and split."
    )
    admin_port: int | None = tcp_port(None, "Admin port; unset: no admin port, 0: any free port.")
    admin_key: str | None = option(
        None,
        "Key for the admin port. Required unless its address is a loopback address or"
        " 'api_keys_file' is set, whose admin keys are valid as well.",
        secret=True,
    )
    admin_names: str = option(
        "",
        "Host names of the admin port, separated by commas, in addition to IP addresses and"
        " localhost.",
    )
    unknown_fields: str = choice(
        "ignore",
        ("ignore", "refuse"),
        "Handling of unknown request fields: ignore with a warning header, or refuse with 400.",
    )
    tool_format: str = like(ModelSettings, "tool_format")
    reasoning_format: str = like(ModelSettings, "reasoning_format")
    user_special_tokens: bool = like(ModelSettings, "user_special_tokens")
    classes: dict[str, Any] = mapping(
        "Latency targets of the classes interactive and standard, each a mapping with ttft_ms,"
        " tpot_ms and token_group; see service-classes.md. Defaults: 500 ms and 100 ms for"
        " interactive, none for standard."
    )
    default_class: str = choice(
        ServiceClass.STANDARD.value,
        (service_class.value for service_class in ServiceClass),
        "Service class of requests that do not select a class.",
    )
    fairness_header: bool = option(
        False,
        "Whether the header x-gateway-inference-fairness-id, or llm-d's"
        " x-llm-d-inference-fairness-id, names the tenant of requests without an API key, among"
        " which the scheduler is fair. Only behind a proxy that sets it.",
    )
    session_affinity: bool = option(
        True,
        "Whether requests of the same session (prompt_cache_key, session_id or the header"
        " x-session-id) prefer the same group among groups that are equal otherwise.",
    )
    messages_529: bool = option(
        True,
        "Whether /v1/messages answers overload with 529, as Anthropic does, instead of 503.",
    )
    cluster_metrics: bool = option(
        False,
        "Whether /metrics at the HTTP port also has sums over the workers of the model:"
        " vllm:num_requests_running, vllm:num_requests_waiting, vllm:kv_cache_usage_perc and"
        " vllm:cache_config_info with engine cluster. For scrapers that read this port only, as"
        " they would count twice beside the workers' own metrics.",
    )
    inflight_max: int = number(
        4096,
        "Maximum concurrent requests of the gateway; further requests get 503.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_inflight_part: float = number(
        0.75,
        "Maximum fraction of 'inflight_max' for requests of class batch, at least one request;"
        " further batch requests get 503. The rest is reserved for online requests.",
        minimum=0,
        maximum=1,
    )
    # The minimum admits a single body of the maximum size.
    body_bytes_max: int = size(
        32 * 2**20,
        "Maximum total bytes of request bodies being read, parsed or tokenised; further large"
        " bodies get 503.",
        minimum=BODY_BYTES_MAX,
        maximum=2**40,
    )
    drain_delay_s: float = number(
        0.0,
        "Seconds after SIGTERM during which /ready fails but requests are still accepted.",
        minimum=0,
        maximum=3600,
    )
    drain_timeout_s: float = number(
        30.0,
        "Seconds after 'drain_delay_s' that running requests may continue before cancellation.",
        minimum=0,
        maximum=86_400,
    )
    request_timeout_s: float = number(
        3600.0,
        "Maximum seconds of a request; then 504. See also 'batch_timeout_s'.",
        minimum=1,
        maximum=86_400,
    )
    # Twice the scheduler's default limit of the queueing time.
    batch_timeout_s: float = number(
        7200.0,
        "Maximum seconds of a request of class batch, queueing included; then 504. Set it longer"
        " than the scheduler's 'batch_queue_deadline_s', which only limits the queueing time.",
        minimum=1,
        maximum=172_800,
    )
    client_stall_s: float = number(
        30.0,
        "Seconds without reading after which a client is disconnected.",
        minimum=0.1,
        maximum=3600,
        expert=True,
    )
    admit_timeout_s: float = number(
        4.0,
        "Seconds that a request may be unknown to every live scheduler; then it gets 503.",
        minimum=0.1,
        maximum=600,
    )
    early_asks: bool = option(
        True,
        "Whether the gateway asks the scheduler before it tokenises a prompt, if the predicted wait"
        " exceeds half of the request's limit, so that a refusal takes less time.",
        expert=True,
    )
    # Longer than the 10 s that a worker waits for a request, so that the worker's error wins.
    attach_timeout_s: float = number(
        12.0,
        "Maximum seconds of silence of a worker that has adopted a request.",
        minimum=0.1,
        maximum=600,
        expert=True,
    )
    resume_streams: bool = option(
        True,
        "Whether a request resumes on another worker if its worker is lost after the first token;"
        " otherwise it ends with an error.",
    )
    idempotency_keep_s: float = number(
        600.0,
        "Seconds that the response to a request with an Idempotency-Key is cached, from its end.",
        minimum=0,
        maximum=86_400,
    )
    idempotency_grace_s: float = number(
        30.0,
        "Seconds that such a request continues after its client disconnects, in case the client"
        " repeats it.",
        minimum=0,
        maximum=3600,
        expert=True,
    )
    idempotency_bytes_max: int = size(
        64 * 2**20,
        "Maximum total bytes of these responses.",
        minimum=2**16,
        maximum=2**40,
        expert=True,
    )
    batches: BatchSettings = nested(BatchSettings())
    tokenizer_threads: int = number(
        2, "Threads for tokenisation.", minimum=1, maximum=64, expert=True
    )

    @property
    def served_models(self) -> tuple[ModelSettings, ...]:
        """The models to serve.

        Raises:
            ConfigError: if there are none, or two with the same name.
        """
        defaults = {key: getattr(self, key) for key in _MODEL_DEFAULTS}
        single = {"model_name": self.model_name, "model_dir": self.model_dir}
        if self.models:
            if given := [key for key, value in single.items() if value is not None]:
                raise ConfigError(f"'models' and '{given[0]}' are both set; remove either")
            if self.model_aliases:
                raise ConfigError(
                    "'models' and 'model_aliases' are both set; add the 'aliases' to a model of"
                    " 'models'"
                )
            return models_of(self.models, defaults)
        if self.model_name is None or self.model_dir is None:
            missing = next(key for key, value in single.items() if value is None)
            raise ConfigError(
                f"'{missing}' is missing; set 'model_name' and 'model_dir', or 'models' for several"
                " models"
            )
        aliases = (name.strip() for name in self.model_aliases.split(","))
        return (
            ModelSettings(
                name=self.model_name,
                dir=self.model_dir,
                aliases=tuple(filter(None, aliases)),
                **defaults,
            ),
        )

    @property
    def batch_inflight_max(self) -> int:
        """Maximum concurrent requests of class batch."""
        return max(1, int(self.inflight_max * self.batch_inflight_part))

    @property
    def overloaded_status(self) -> int:
        """HTTP status of overload in Anthropic's API."""
        return 529 if self.messages_529 else 503

    @property
    def exposure(self) -> str | None:
        """A warning if the network can use HTTP or gRPC without a key."""
        keyed = self.api_key is not None or self.api_keys_file is not None
        has_grpc = self.public_grpc_port is not None and self.public_grpc_ca_file is None
        return exposure_warning(self.host, self.public_grpc_host if has_grpc else None, keyed)

    def __post_init__(self) -> None:
        # Not `super()`, which fails here: with slots=True, dataclass replaces the class.
        ServiceConfig.__post_init__(self)
        class_targets(self.classes)
        # Refuse invalid models when the configuration is loaded.
        _ = self.served_models
        if self.admin_port is None:
            return
        keys = self.admin_key is not None or self.api_keys_file is not None
        if not keys and not is_loopback(self.admin_host):
            raise ConfigError(
                f"the admin port at {self.admin_host} would be exposed to the network without a"
                " key; set 'admin_key_file', 'admin_key' or 'api_keys_file', or set 'admin_host'"
                " to 127.0.0.1"
            )
        if self.admin_key is not None and len(self.admin_key.strip()) < ADMIN_KEY_MIN:
            raise ConfigError(
                f"'admin_key' is shorter than {ADMIN_KEY_MIN} characters; generate a key, for"
                " example with: openssl rand -hex 32"
            )
