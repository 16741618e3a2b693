"""Configuration of the gateway."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.address import is_loopback
from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.core.service import ServiceClass
from services.core.setting import choice, mapping, number, option, size, tcp_port
from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.tools.format import AUTO, ReasoningFormat, ToolFormat
from services.gateway.vocabulary.class_targets import class_targets

ADMIN_KEY_MIN = 16
TOOL_FORMATS = (AUTO, *(form.value for form in ToolFormat))
REASONING_FORMATS = (AUTO, *(form.value for form in ReasoningFormat))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """What the gateway is told at its start."""

    model_name: str = option(help="Name that clients send.")
    model_dir: Path = option(help="Folder with config.json and tokenizer.json.")
    model_aliases: str = option(
        "", "More names by which clients may call the model, separated by commas."
    )
    generation_config: str = choice(
        "auto",
        ("auto", "none"),
        "Where defaults of sampling come from: the model's generation_config.json, or nowhere but"
        " the OpenAI API.",
    )
    host: str = option(
        "127.0.0.1", "Address to listen on for HTTP; 0.0.0.0 opens it to the network."
    )
    port: int = tcp_port(8000, "Port of HTTP; 0: any free one.")
    http_tls_cert_file: Path | None = option(
        None,
        "Certificate for HTTPS, read again when it changes; none: HTTP. The admin port uses it,"
        " too, unless its address is a loopback one.",
    )
    http_tls_key_file: Path | None = option(None, "Private key of that certificate.")
    keep_alive_s: float = number(
        75.0,
        "Seconds that an HTTP connection stays open after an answer. It must be longer than proxies"
        " and clients keep idle ones (nginx and AWS's load balancers 60 s, Go's clients 90 s), or"
        " they send into one that is being closed. The admin port takes it, too.",
        minimum=1,
        maximum=3600,
    )
    grpc_host: str = option("127.0.0.1", "Address to listen on for gRPC.")
    grpc_port: int = tcp_port(0, "Port of gRPC between services; 0: any free one.")
    public_grpc_host: str = option(
        "127.0.0.1", "Address to listen on for clients' gRPC; 0.0.0.0 opens it to the network."
    )
    public_grpc_port: int | None = tcp_port(
        None, "Port of clients' gRPC; none by default, 0: any free one."
    )
    public_grpc_ca_file: Path | None = option(
        None,
        "CA of the certificates that gRPC clients must have; none: they need none. The server's is"
        " that of HTTPS.",
    )
    public_grpc_reflection: bool = option(
        True, "Whether gRPC clients may ask for the contracts, as grpcurl does."
    )
    expected_workers: int | None = number(
        None,
        "Workers without which /ready does not say yes for the first time, as long as"
        " `expected_wait_s` allows; later, and if none are given, it says yes while a request can"
        " be placed.",
        minimum=1,
        maximum=100_000,
    )
    expected_wait_s: float = number(
        60.0,
        "Seconds that /ready waits for `expected_workers` at most, from when a request could be"
        " placed first.",
        minimum=0,
        maximum=86400,
        expert=True,
    )
    api_key: str | None = option(
        None, "A key of clients, without owner and limits; see also 'api_keys_file'.", secret=True
    )
    api_keys_file: Path | None = option(
        None,
        "File of clients' and admins' keys with their owners and limits, as `tideserve key` writes"
        " it; read again when it changes.",
    )
    cors_origins: str = option(
        "",
        "Origins, separated by commas, whose pages browsers let use the API, such as"
        " https://app.example; * for all.",
    )
    public_metrics: bool = option(
        True, "Whether this gateway's own /metrics are at the port of HTTP, too."
    )
    admin_host: str = option(
        "127.0.0.1", "Address of the admin port: the live page, status, merge and split."
    )
    admin_port: int | None = tcp_port(None, "The admin port; none by default, 0: any free one.")
    admin_key: str | None = option(
        None,
        "Key of the admin port; needed unless its address is a loopback one or there is"
        " 'api_keys_file', whose admin keys open the port, too.",
        secret=True,
    )
    admin_names: str = option(
        "",
        "Host names, separated by commas, under which browsers and programs may reach the admin"
        " port, besides addresses and localhost.",
    )
    unknown_fields: str = choice(
        "ignore",
        ("ignore", "refuse"),
        "What becomes of fields in requests that nobody knows: a warning header, or 400.",
    )
    tool_format: str = choice(
        AUTO,
        TOOL_FORMATS,
        "How the model writes calls of tools; auto: found in its template and tokenizer.",
    )
    reasoning_format: str = choice(
        AUTO,
        REASONING_FORMATS,
        "How the model writes reasoning; auto: found in its template and tokenizer.",
    )
    classes: dict[str, Any] = mapping(
        "Targets of the classes interactive and standard, each a mapping with ttft_ms, tpot_ms and"
        " token_group; see service-classes.md. A class that is left out keeps its default:"
        " 500 ms and 100 ms for interactive, none for standard."
    )
    default_class: str = choice(
        ServiceClass.STANDARD.value,
        (one.value for one in ServiceClass),
        "Class of requests that name none.",
    )
    inflight_max: int = number(
        4096,
        "Requests that may be in the gateway at once; more get 503.",
        minimum=1,
        maximum=1_000_000,
    )
    batch_inflight_part: float = number(
        0.75,
        "Part of 'inflight_max' that requests of class batch may take, at least one; more of them"
        " get 503, and online ones always find the rest.",
        minimum=0,
        maximum=1,
    )
    # There is room for at least one of the largest.
    body_bytes_max: int = size(
        32 * 2**20,
        "Bytes of all bodies being read, parsed or tokenised; a large body beyond gets 503.",
        minimum=BODY_BYTES_MAX,
        maximum=2**40,
    )
    drain_delay_s: float = number(
        0.0,
        "Seconds after SIGTERM in which requests are still accepted while /ready says no.",
        minimum=0,
        maximum=3600,
    )
    drain_timeout_s: float = number(
        10.0,
        "Seconds that running streams may go on after that; longer ones are cut.",
        minimum=0,
        maximum=86_400,
    )
    request_timeout_s: float = number(
        3600.0,
        "Seconds that a request may take; then 504. See also 'batch_timeout_s'.",
        minimum=1,
        maximum=86_400,
    )
    # Twice the time that the scheduler lets it wait by default.
    batch_timeout_s: float = number(
        7200.0,
        "Seconds that a request of class batch may take, waiting and running together; then 504."
        " Leave it time to run after the scheduler's 'batch_queue_deadline_s', which bounds its"
        " wait alone.",
        minimum=1,
        maximum=172_800,
    )
    client_stall_s: float = number(
        30.0,
        "Seconds after which a client that takes nothing is cut.",
        minimum=0.1,
        maximum=3600,
        expert=True,
    )
    admit_timeout_s: float = number(
        4.0,
        "Seconds after which a request that no living scheduler knows gets 503.",
        minimum=0.1,
        maximum=600,
    )
    # More than the 10 s that a worker waits for a request, so that its answer comes first.
    attach_timeout_s: float = number(
        12.0,
        "Seconds that a worker to which a request has moved may be silent.",
        minimum=0.1,
        maximum=600,
        expert=True,
    )
    resume_streams: bool = option(
        True,
        "Whether a request whose worker was lost after its first token goes on at another one; else"
        " it ends with an error.",
    )
    idempotency_keep_s: float = number(
        600.0,
        "Seconds for which the answer to a request with an Idempotency-Key is kept, from its end.",
        minimum=0,
        maximum=86_400,
    )
    idempotency_grace_s: float = number(
        30.0,
        "Seconds that such a request goes on after its client has gone, for one that sends it"
        " again.",
        minimum=0,
        maximum=3600,
        expert=True,
    )
    idempotency_bytes_max: int = size(
        64 * 2**20, "Bytes that these answers may have.", minimum=2**16, maximum=2**40, expert=True
    )
    tokenizer_threads: int = number(
        2, "Threads that tokenise and apply templates.", minimum=1, maximum=64, expert=True
    )

    @property
    def batch_inflight_max(self) -> int:
        """Requests of class batch that may be in the gateway at once."""
        return max(1, int(self.inflight_max * self.batch_inflight_part))

    def __post_init__(self) -> None:
        # Without `super`: a dataclass with slots is another class than the one in its body.
        ServiceConfig.__post_init__(self)
        class_targets(self.classes)
        if self.admin_port is None:
            return
        keys = self.admin_key is not None or self.api_keys_file is not None
        if not keys and not is_loopback(self.admin_host):
            raise ConfigError(
                f"the admin port at {self.admin_host} would be open to the network without a key;"
                " set 'admin_key_file', 'admin_key' or 'api_keys_file', or 'admin_host' to"
                " 127.0.0.1"
            )
        if self.admin_key is not None and len(self.admin_key.strip()) < ADMIN_KEY_MIN:
            raise ConfigError(
                f"'admin_key' is shorter than {ADMIN_KEY_MIN} characters; make one, for example"
                " with: openssl rand -hex 32"
            )
