"""Options of a cluster, from the file of --config and from flags.

An option that a service has as well takes its checks, help and default from the field of the
service's configuration. `option_command` creates flags from the fields that have a panel.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common.config import (
    KEPT,
    SourcedValue,
    build,
    check_keys,
    given_in,
    like,
    read_values,
    read_yaml,
)
from services.common.device_profile import load_profile, split_slowdown
from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.common.setting import settings_of
from services.core.engine_kind import EngineKind
from services.core.overload.events import OverloadPolicy
from services.core.setting import computed, mapping, number, option
from services.gateway.config import GatewayConfig
from services.memmgr.config import MemmgrConfig
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from tideserve.cli.default import DEFAULT_WORKERS
from tideserve.cli.model_list import ListedModel, read_model_list
from tideserve.cli.option_checks import check_device, check_roles, check_swap
from tideserve.cli.option_types import (
    API_KEY_HELP,
    API_KEYS_HELP,
    CLUSTER_DIR_DEFAULT,
    CLUSTER_DIR_HELP,
)

MODEL, RESOURCES, LIMITS, CLUSTER = "Model", "Resources", "Limits", "Cluster"
CONFIGS: Mapping[str, type[ServiceConfig]] = {
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "memmgr": MemmgrConfig,
    "worker": WorkerConfig,
}
SETTINGS = {name: settings_of(config) for name, config in CONFIGS.items()}
READY_TIMEOUTS_S = {
    EngineKind.TIDESERVE: 600.0,
    EngineKind.VLLM: 1800.0,
    EngineKind.OPENAI: 600.0,
}
TORCH_THREADS_MIN = 8
"""Threads of torch that match the compiled kernels on a single thread. Two threads of torch took
2.6 times as long for a prompt and 3.6 times for a token (bfloat16, EPYC of family 26)."""
SERVICES = "services"
SECTIONS = (*CONFIGS, SERVICES)
"""Sections whose keys are passed to services unchanged."""
COMMAND_LINE = "the command line"
# Keys that the cluster derives; a different value in a section would break the cluster.
SETTLED_KEYS = frozenset(
    {
        "etcd_url",
        "expected_workers",
        "host",
        "model_dir",
        "model_name",
        "models",
        "port",
        "run_dir",
        "worker_id",
    }
)


def _of(key: str, panel: str | None = None, service: str = "", **changes: Any) -> Any:
    """An option that is passed as `key` to `service`, or to every service that has the key.

    Without a value, the service uses its default; with `default=KEPT`, that is also the default
    here.
    """
    services = [name for name, settings in SETTINGS.items() if key in settings]
    if service:
        services = [service]
    if changes.setdefault("default", None) is None:
        changes.setdefault("default_text", SETTINGS[services[0]][key].default_text)
    return like(CONFIGS[services[0]], key, panel=panel, passed_to=(services, key), **changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Options of `tideserve up`; a key in the --config file has the flag's name in snake_case.

    Sizes are bytes, or in the file and on the command line text such as "1GiB"; durations are
    seconds. None selects the default of the service. Sections are passed on unchanged.
    """

    model: str | None = option(
        None,
        "Hub id, with @REVISION to pin it, or local folder with safetensors.",
        default_text="SmolLM2-135M-Instruct",
        panel=MODEL,
    )
    model_name: str | None = _of(
        "model_name",
        MODEL,
        help="Model name in requests.",
        default_text="the hub id or the folder's name",
    )
    models: Path | None = option(
        None,
        "YAML file with several models, instead of --model and --workers: each with its workers,"
        " memory and aliases. See docs/models.md.",
        default_text="none",
        panel=MODEL,
    )
    listed_models: tuple[ListedModel, ...] = computed(())
    dtype: str = _of("dtype", MODEL, default=KEPT)
    load_format: str = _of("load_format", MODEL, default=KEPT)
    engine: str = _of("engine", MODEL, default=KEPT)
    engine_python: Path | None = _of(  # noqa: RUF009  # it makes a field
        "engine_python",
        MODEL,
        default_text="the Python of `tideserve engine install vllm`",
    )
    upstream: tuple[str, ...] = option(
        (),
        "Address of a server with OpenAI's API that runs already, such as http://host:8000, instead"
        " of workers that run the model; repeat it for several. See docs/upstreams.md.",
        default_text="none",
        panel=MODEL,
    )
    upstream_model: str | None = _of("upstream_model", MODEL)
    upstream_key_file: Path | None = _of(  # noqa: RUF009  # it makes a field
        "upstream_key_file", MODEL
    )
    workers: int = number(
        DEFAULT_WORKERS,
        "Number of workers; each holds the model.",
        minimum=1,
        maximum=64,
        panel=RESOURCES,
    )
    memory: int = _of("memory_bytes", RESOURCES, default=2**30)
    host_memory: int | None = _of("host_memory", RESOURCES)
    device: str = _of("device", RESOURCES, default=KEPT)
    threads: int | None = _of(
        "threads",
        RESOURCES,
        default_text=f"processors / workers; 1 if that is below {TORCH_THREADS_MIN} and the engine"
        " is tideserve's",
    )
    chunk_size: int | None = _of("chunk_bytes", RESOURCES)
    block_size: int | None = _of("block_size", RESOURCES)
    paced: str | None = _of("paced", RESOURCES)
    overload_policy: str | None = _of("overload_policy", LIMITS)
    rebalance: str | None = _of("rebalance", LIMITS)
    roles: str | None = _of("roles", LIMITS)
    hand_over_min_tokens: int | None = _of("hand_over_min_tokens", LIMITS)
    scheduling: str | None = _of("scheduling", LIMITS)
    harvest: float | None = _of("harvest", LIMITS)
    max_running: int | None = _of("max_running", LIMITS)
    max_batch_tokens: int | None = _of("max_batch_tokens", LIMITS)
    preempt: str | None = _of("preempt", LIMITS)
    max_model_len: int | None = _of("max_model_len", LIMITS)
    queue_limit: int | None = _of("queue_limit", LIMITS)
    queue_deadline: float | None = _of("queue_deadline_s", LIMITS)
    host: str = _of("host", CLUSTER, "gateway", default=KEPT)
    port: int = _of(
        "port",
        CLUSTER,
        "gateway",
        default=KEPT,
        help="HTTP port. The live page uses this port + 10,000 and gRPC + 20,000, if free."
        " Services discover the other ports through etcd.",
        range=(1, 65535),
    )
    grpc_port: int = _of(
        "public_grpc_port",
        CLUSTER,
        "gateway",
        default=0,
        help="gRPC port for clients; 0: --port + 20,000, or a free port.",
        range=(0, 65535),
    )
    api_key: str | None = _of("api_key", help=API_KEY_HELP)
    api_keys: Path | None = _of(  # noqa: RUF009  # it makes a field
        "api_keys_file", CLUSTER, help=API_KEYS_HELP
    )
    etcd: str | None = option(
        None, "URL of a running etcd.", default_text="a private etcd", panel=CLUSTER
    )
    lease_ttl: int | None = _of("lease_ttl_s", CLUSTER)
    ready_timeout: float | None = number(
        None,
        "Seconds until the cluster must be ready.",
        minimum=1,
        maximum=86_400,
        default_text="600; with vLLM, 1800: the first start compiles kernels",
        panel=CLUSTER,
    )
    cluster_dir: Path | None = option(None, CLUSTER_DIR_HELP, default_text=CLUSTER_DIR_DEFAULT)
    gateway: dict[str, Any] = mapping("More keys of the gateway.")
    scheduler: dict[str, Any] = mapping("More keys of the scheduler.")
    memmgr: dict[str, Any] = mapping("More keys of the memory manager.")
    worker: dict[str, Any] = mapping("More keys of the workers.")
    services: dict[str, Any] = mapping("More keys of every service, such as those of etcd.")

    @property
    def threads_per_worker(self) -> int:
        """Compute threads of each worker: its share of the CPUs of this process.

        With few CPUs, the compiled kernels on one thread are faster than torch on all of them.
        """
        if self.threads:
            return self.threads
        share = max(1, len(os.sched_getaffinity(0)) // self.workers)
        kernels = self.engine_kind == EngineKind.TIDESERVE
        return 1 if kernels and share < TORCH_THREADS_MIN else share

    @property
    def engine_kind(self) -> str:
        """The engine; a key of section `worker` overrides the option."""
        return str(self.worker.get("engine", self.engine))

    @property
    def memories(self) -> list[int]:
        """Device memory of each worker, in bytes."""
        if not self.listed_models:
            return [self.memory] * self.workers
        return [m.memory or self.memory for m in self.listed_models for _ in range(m.workers)]

    @property
    def swaps(self) -> bool:
        """Whether workers copy the KV of all requests to host memory."""
        policy = self.memmgr.get("overload_policy", self.overload_policy)
        return bool(policy == OverloadPolicy.SWAP)

    @property
    def ready_timeout_s(self) -> float:
        """Seconds until the cluster must be ready."""
        return self.ready_timeout or READY_TIMEOUTS_S[EngineKind(self.engine_kind)]

    def etcd_access(self, url: str) -> dict[str, Any]:
        """Configuration keys to access the etcd at `url`."""
        own = {key: value for key, value in self.services.items() if key.startswith("etcd_")}
        return with_absolute_paths(own) | {"etcd_url": url}


def read_options(
    path: Path | None, flags: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> ClusterOptions:
    """Options from the file at `path`, overridden by `flags` that are not None.

    `defaults` replace the defaults of the options.

    Raises:
        ConfigError: with a sentence about the first invalid key or value.
    """
    given = {key: SourcedValue(value, COMMAND_LINE) for key, value in (defaults or {}).items()}
    given |= {} if path is None else _given_in(path)
    check_keys(flags, list(settings_of(ClusterOptions)), COMMAND_LINE)
    given |= {key: SourcedValue(v, COMMAND_LINE) for key, v in flags.items() if v is not None}
    options = build(ClusterOptions, given, lambda key: f"missing in {path or COMMAND_LINE}")
    if options.upstream:
        options = _with_upstreams(options, given)
    if options.models is not None:
        options = _with_models(options, options.models, given)
    if options.paced is not None:
        options = replace(options, paced=profile_name(options.paced))
    if options.etcd is None and options.etcd_access("").keys() - {"etcd_url", "etcd_prefix"}:
        raise ConfigError(
            "section 'services' configures access to an etcd, but the cluster would start a private"
            " etcd; set option 'etcd' to the URL of your etcd"
        )
    for section in SECTIONS:
        place = f"section '{section}' of {path or COMMAND_LINE}"
        _check_section(getattr(options, section), section, place)
    for position, model in enumerate(options.listed_models, 1):
        place = f"section 'worker' of model {position} of {options.models}"
        _check_section(model.worker, "worker", place)
    check_device(str(options.worker.get("device", options.device)), options.engine_kind)
    check_roles(
        options.memmgr.get("roles", options.roles) or "mixed",
        options.engine_kind,
        [(model.workers, {**options.worker, **model.worker}) for model in options.listed_models]
        or [(options.workers, options.worker)],
        options.scheduler,
    )
    if options.swaps:
        common = {**options.services, **options.worker}
        models = [{**common, **model.worker} for model in options.listed_models]
        check_swap(models or [common], options.host_memory)
    return options


def _with_models(
    options: ClusterOptions, path: Path, given: Mapping[str, SourcedValue]
) -> ClusterOptions:
    """The options with the models of the file at `path`. Raises ConfigError."""
    for key in ("model", "model_name", "upstream", "upstream_model"):
        if getattr(options, key):
            raise ConfigError(f"'models' and '{key}' are both set; remove either")
    listed = read_model_list(path.expanduser())
    workers = sum(model.workers for model in listed)
    if "workers" in given and options.workers != workers:
        raise ConfigError(
            f"'workers' is {options.workers}, but the models of {path} have"
            f" {workers} worker{'s' if workers > 1 else ''}; remove it"
        )
    return replace(options, listed_models=listed, workers=workers)


def _with_upstreams(options: ClusterOptions, given: Mapping[str, SourcedValue]) -> ClusterOptions:
    """The options with a worker for each upstream server. Raises ConfigError."""
    implied = replace(options, engine=EngineKind.OPENAI, workers=len(options.upstream))
    for key in ("engine", "workers"):
        if key in given and getattr(options, key) != getattr(implied, key):
            raise ConfigError(
                f"'{key}' is {getattr(options, key)}, but with these upstream servers it is"
                f" {getattr(implied, key)}; remove it"
            )
    return implied


def _given_in(path: Path) -> dict[str, SourcedValue]:
    """The options in the file at `path`. Raises ConfigError."""
    data = read_yaml(path)
    for key in data:
        sections = _sections_with(key)
        if sections:
            raise ConfigError(
                f"unknown configuration key '{key}' in {path}; it is a key of section"
                f" {' or '.join(map(repr, sections))}: write `{sections[0]}: {{{key}: …}}`"
            )
    return given_in(ClusterOptions, data, str(path))


def _sections_with(key: str) -> list[str]:
    """The sections with a key that is not an option of the cluster itself."""
    options = settings_of(ClusterOptions)
    named = {option.metadata.get("passed_to", ((), ""))[1] for option in options.values()}
    if key in named | SETTLED_KEYS | options.keys():
        return []
    if key in settings_of(ServiceConfig):
        return [SERVICES]
    return [name for name, settings in SETTINGS.items() if key in settings]


def profile_name(name_or_path: str) -> str:
    """The name of a shipped profile, or an absolute path, because workers run in another folder."""
    load_profile(name_or_path)
    place, _ = split_slowdown(name_or_path)
    path = Path(place).expanduser()
    if not path.is_file():
        return name_or_path
    return str(path.absolute()) + name_or_path.removeprefix(place)


def with_absolute_paths(section: Mapping[str, Any]) -> dict[str, Any]:
    """The section with absolute paths of files, because services run in another folder."""
    return {
        key: str(Path(value).expanduser().absolute())
        if key.endswith("_file") and isinstance(value, str | Path)
        else value
        for key, value in section.items()
    }


def _check_section(section: Mapping[Any, Any], name: str, place: str) -> None:
    """Reject keys that would break the cluster, and values that a service would reject later.

    Unknown keys are left to the service. `place` is that of the section, for messages.
    """
    for key in section:
        if not isinstance(key, str):
            raise ConfigError(f"the key {key!r} of {place} must be text")
        if key in SETTLED_KEYS:
            raise ConfigError(
                f"'{key}' cannot be set in {place}, because the cluster derives it from its"
                " options; remove it"
            )
    given = {key: SourcedValue(value, place) for key, value in section.items()}
    read_values(CONFIGS.get(name, ServiceConfig), given)
