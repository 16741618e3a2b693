"""Configuration of a worker: model, engine, device, memory, limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.common.setting import PAGE_BYTES
from services.core.cost.padded import Execution
from services.core.engine_kind import EngineKind
from services.core.planner.config import GPU_LIMITS, IterationConfig
from services.core.planner.victims import VictimRule
from services.core.queue_order import Scheduling
from services.core.role import Role
from services.core.setting import (
    choice,
    device_name,
    mapping,
    nested,
    number,
    option,
    served_name,
    size,
    tcp_port,
)
from services.worker.adapter_settings import AdapterSettings
from services.worker.engine_args import devices_of, normalized
from services.worker.host_config import HostConfig
from services.worker.upstream_url import is_upstream_url

# Kinds of device that tideserve's engine supports.
DEVICES = ("cpu", "cuda")
# Options of workers and planners that only tideserve's own engine supports; each is None, 0 or
# false if unset.
OWN_ENGINE_OPTIONS = (
    "block_sharing",
    "chunk_bytes",
    "event_log",
    "host_memory",
    "host_weights_bytes",
    "paced",
    "pace_links",
)
# Options that only vLLM supports.
VLLM_OPTIONS = ("engine_args", "engine_python")
# Options of `engine: openai`; each is empty or None if unset.
UPSTREAM_OPTIONS = ("upstream_url", "upstream_model", "upstream_key_file", "upstream_kv_tokens")
# An upstream server's own limits apply, and none of this machine's memory.
UPSTREAM_DEFAULTS: Mapping[str, int] = {**GPU_LIMITS, "memory_bytes": 1}
# vLLM's kernels for CPUs need blocks of a multiple of 32 tokens.
VLLM_DEFAULTS: Mapping[str, int] = {
    "block_size": 32,
    "max_batch_tokens": GPU_LIMITS["max_batch_tokens"],
}


class DrainMode(StrEnum):
    """What happens to the requests of a worker that shuts down."""

    MOVE = "move"
    WAIT = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """The model, engine, device and memory of a worker."""

    worker_id: str = option("", "Name of this worker, unique in its cluster; empty: the host name.")
    model_name: str = served_name("Model name in requests.")
    model_dir: Path = option(
        help="Folder with config.json, tokenizer.json and *.safetensors weights."
    )
    run_dir: Path | None = option(
        None,
        "Private folder for the socket between servicer and engine; none: a temporary folder,"
        " removed at exit.",
    )
    memory_bytes: int = size(
        help="Device memory of a worker for parameters, KV cache and staging together.",
        minimum=1,
        maximum=2**50,
    )
    host: str = option("127.0.0.1", "Listen address for gRPC and transfers between engines.")
    port: int = tcp_port(0, "gRPC port; 0: any free port.")
    engine: str = choice(
        "tideserve",
        EngineKind,
        "Engine that runs the model: tideserve's own, vLLM in its own Python environment, or"
        " openai: a server with OpenAI's API that runs already, at `upstream_url`. Only workers"
        " with tideserve's engine merge and drop layers.",
    )
    engine_python: Path | None = option(
        None,
        "Python interpreter of vLLM's environment; `tideserve engine install vllm` creates it and"
        " prints the path.",
        default_text="none; required for `engine: vllm`",
    )
    engine_args: dict[str, Any] = mapping(
        "Further engine arguments of vLLM by their names there, such as {tensor_parallel_size: 2,"
        " quantization: fp8}; vLLM's own parser checks them before the model is loaded."
    )
    upstream_url: str = option(
        "",
        "Address of the server for `engine: openai`, without a path, such as http://host:8000.",
    )
    upstream_model: str = option(
        "", "Name of the model at that server; empty: `model_name`, or the server's only model."
    )
    upstream_key_file: Path | None = option(None, "File with the API key of that server.")
    upstream_kv_tokens: int | None = number(
        None,
        "KV cache of that server, in tokens.",
        minimum=1,
        maximum=2**40,
        default_text="what its /metrics export, else room for `max_running` requests of the"
        " longest length",
    )
    upstream_wait_s: float = number(
        180.0,
        "Seconds that a request waits for a server that is gone or full.",
        minimum=0,
        maximum=86400,
    )
    location: str = option(
        "",
        "Location of the worker from widest to narrowest, such as zone/rack/host: nearby workers"
        " merge first. Empty: only the host is known.",
    )
    role: Role = choice(
        Role.MIXED,
        Role,
        "What the worker is meant for: to compute prompts and hand the requests over (prefill), to"
        " decode (decode), or both. It is a wish, which counts while the memory manager's `roles`"
        " is not mixed.",
    )
    activation_port: int = tcp_port(0, "Port for activations between engines; 0: any free port.")
    bulk_port: int = tcp_port(0, "Port for KV and parameters between engines; 0: any free port.")
    device: str = device_name("cpu", "Device that runs the model.")
    dtype: str = choice(
        "bfloat16", ("bfloat16", "float32", "float64"), "Type of weights, activations and KV."
    )
    load_format: str = choice(
        "auto", ("auto", "dummy"), "auto: load the weights from files; dummy: random weights."
    )
    chunk_bytes: int | None = size(
        None,
        "Allocation unit of device memory, such as 2MiB.",
        minimum=PAGE_BYTES,
        maximum=2**30,
        multiple_of=PAGE_BYTES,
        default_text="derived from the model's sizes",
        expert=True,
    )
    planner: IterationConfig = nested(IterationConfig())
    adapters: AdapterSettings = nested(AdapterSettings())
    max_model_len: int | None = number(
        None,
        "Maximum tokens per request, prompt plus output.",
        minimum=1,
        maximum=2**31 - 1,
        default_text="what the model and the KV cache allow",
    )
    threads: int = number(
        1,
        "Compute threads. tideserve's compiled CPU kernels require 1; with more threads, torch"
        " computes.",
        minimum=1,
        maximum=1024,
    )
    start_timeout_s: float = number(
        600.0, "Time limit for loading the model, in seconds.", minimum=1, maximum=86400
    )
    coordinated_exchange: bool = option(
        True, "Whether bulk transfers (KV, parameters) yield to activations.", expert=True
    )
    link_bytes_per_s: int = size(
        10**9,
        "Minimum network bandwidth between two workers, in bytes per second (10 Gbit/s:"
        " 1250000000). KV exchanges start at this rate and adapt to the measured bandwidth. If a"
        " peer sends parameters at less than a quarter of it, they are loaded from the model folder"
        " instead.",
        minimum=1,
        maximum=2**50,
    )
    overlap: bool = option(
        False,
        "Whether a GPU copies KV and layers, and results are published, while iterations run. Not"
        " measured on a GPU yet.",
        expert=True,
    )
    host_weights_bytes: int = size(
        0,
        "Host memory of each worker for copies of layers, from which dropped layers are restored"
        " first; 0: none. The copies are made while the model is loaded; on a GPU they are pinned.",
        minimum=0,
        maximum=2**50,
    )
    host_copies: HostConfig = nested(HostConfig())
    device_sampling: bool = option(
        True,
        "Whether a GPU chooses the tokens, for logits of up to 32 bits; if not, the host does. No"
        " effect without a GPU.",
        expert=True,
    )
    slabs_at_once: int = number(
        4,
        "Layers that a worker restores at the same time.",
        minimum=1,
        maximum=64,
        expert=True,
    )
    ucx_transports: str = option(
        "sm,tcp", "UCX_TLS between engines, such as rc,sm,tcp for RDMA between hosts."
    )
    ucx_devices: str = option(
        "",
        "UCX_NET_DEVICES between engines; empty: loopback if `host` is a loopback address, else"
        " all.",
    )
    ucx_ports: str = option(
        "",
        "UCX_TCP_PORT_RANGE between engines, such as 50063-50066, for networks with a firewall: two"
        " ports per network device. Empty: any free ports.",
    )
    engine_unready_s: float = number(
        10.0,
        "Seconds without a heartbeat after which an engine gets no new requests. After half of"
        " them, and at least 1.5 s, its requests resume on another worker. tideserve's engine sends"
        " heartbeats during an iteration; for vLLM the limit is ten times its recent longest gap.",
        minimum=1,
        maximum=3600,
    )
    engine_dead_s: float = number(
        60.0,
        "Seconds after which a silent engine ends the worker. Must exceed the longest iteration,"
        " which is bounded by max_batch_tokens.",
        minimum=1,
        maximum=86400,
        expert=True,
    )
    drain: DrainMode = choice(
        DrainMode.MOVE,
        DrainMode,
        "What happens to running requests after SIGTERM: move lets other workers with room resume"
        " them, for gateways with `resume_streams`; wait lets them finish.",
    )
    drain_timeout_s: float = number(
        30.0,
        "Seconds that running requests may continue after SIGTERM.",
        minimum=0,
        maximum=86400,
    )
    paced: str | None = option(
        None,
        "Device profile, by name or file, whose iteration times are simulated by padding, such as"
        " A100-14B; A100-14B:2 is half as fast.",
    )
    pace_links: float = number(
        0.0,
        "With `paced`: Gbit/s of the link of a simulated device. KV and parameters are sent as"
        " slowly as those of the profile's model over such a link, by each worker; what a worker"
        " receives from several others at once is not slowed. 0: as fast as this machine sends.",
        minimum=0,
        maximum=100_000,
    )
    profile_dir: Path | None = option(
        None, "Folder for measured profiles; none: profiles are not stored."
    )
    profile_when_idle: bool = option(True, "Whether an idle worker profiles itself.", expert=True)
    learn_costs: bool = option(
        True,
        "Whether a worker measures a rough cost model at its start if no profile is stored (about 2"
        " s; longer on a busy host), refines it under load, and adopts a profile that it measures"
        " while idle; off: only a stored profile is used.",
    )

    @staticmethod
    def defaults_for(given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on the engine and device."""
        defaults: dict[str, Any] = {}
        if given.get("engine") == EngineKind.VLLM:
            defaults = dict(VLLM_DEFAULTS)
        elif given.get("engine") == EngineKind.OPENAI:
            defaults = dict(UPSTREAM_DEFAULTS)
        elif given.get("device", "cpu") != "cpu":
            defaults = dict(GPU_LIMITS)
        usual = IterationConfig()
        limits = {**defaults, **given}
        running = limits.get("max_running", usual.max_running)
        tokens = limits.get("max_batch_tokens", usual.max_batch_tokens)
        # A batch must have room for a token of every running request: derive a limit that is not
        # set from the other.
        if running > tokens:
            defaults |= {"max_running": tokens, "max_batch_tokens": running}
        return defaults

    @property
    def engine_devices(self) -> int:
        """Devices of the worker: `device` and those that follow it."""
        return devices_of(self.vllm_arguments)

    @property
    def vllm_arguments(self) -> dict[str, Any]:
        """`engine_args` with underscores in names."""
        return normalized(self.engine_args)

    @property
    def location_parts(self) -> tuple[str, ...]:
        """The parts of `location`, from widest to narrowest."""
        return tuple(part for part in self.location.split("/") if part)

    def __post_init__(self) -> None:
        # Not `super()`: `slots=True` replaces the class that `super()` refers to.
        ServiceConfig.__post_init__(self)
        if self.planner.scheduling is not Scheduling.SLO:
            self._check_slo_options()
        execution = self.planner.execution
        if execution is not Execution.RAGGED and self.paced is None:
            raise ConfigError(
                f"`execution: {execution}` only changes the times of paced workers; set 'paced' to"
                " a device profile, or remove 'execution'"
            )
        if self.pace_links and self.paced is None:
            raise ConfigError(
                "'pace_links' only slows transfers of paced workers; set 'paced' to a device"
                " profile, or remove 'pace_links'"
            )
        if self.engine == EngineKind.VLLM:
            self._check_vllm()
        else:
            self._refuse_vllm_options()
        self._check_upstream()
        self._check_role()
        self.host_copies.check(prefix_caching=self.planner.prefix_caching)
        self.adapters.check(self.engine)

    def _check_role(self) -> None:
        """Reject a role that the worker could never get."""
        if self.role is Role.MIXED:
            return
        reason = ""
        if self.engine != EngineKind.TIDESERVE:
            reason = f"engine {self.engine} hands over no requests"
        elif not self.planner.prefix_caching:
            reason = "requests are handed over only with 'prefix_caching'"
        if reason:
            raise ConfigError(
                f"'role' is {self.role}, but {reason}; correct that, or set 'role' to mixed"
            )

    def _check_slo_options(self) -> None:
        """Reject options that only `scheduling: slo` uses, since they would have no effect."""
        planner = self.planner
        slo_options = {"packing": planner.packing, "adaptive_slots": planner.adaptive_slots}
        slo_options["victims"] = planner.victims is not VictimRule.NEWEST
        for name in (name for name, is_set in slo_options.items() if is_set):
            raise ConfigError(
                f"'{name}' has no effect with `scheduling: {planner.scheduling}`; remove it, or set"
                " 'scheduling' to 'slo'"
            )

    def _refuse_vllm_options(self) -> None:
        for name in VLLM_OPTIONS:
            if getattr(self, name):
                raise ConfigError(
                    f"'{name}' requires `engine: vllm`; remove it, or set 'engine' to 'vllm'"
                )

    def _check_upstream(self) -> None:
        if self.engine != EngineKind.OPENAI:
            for name in UPSTREAM_OPTIONS:
                if getattr(self, name):
                    raise ConfigError(
                        f"'{name}' requires `engine: openai`; remove it, or set 'engine' to"
                        " 'openai'"
                    )
            return
        if not is_upstream_url(self.upstream_url):
            raise ConfigError(
                f"'upstream_url' is '{self.upstream_url}', but with `engine: openai` must be the"
                " address of a server without a path and a password, such as http://host:8000"
            )
        self._check_own_options("an upstream server")

    def _check_own_options(self, engine: str) -> None:
        """Reject options that only tideserve's own engine supports."""
        for name in OWN_ENGINE_OPTIONS:
            parts = (self, self.planner, self.host_copies)
            if any(getattr(part, name, None) for part in parts):
                raise ConfigError(
                    f"'{name}' has no effect with {engine}; remove it, or set 'engine' to"
                    " 'tideserve'"
                )

    def _check_vllm(self) -> None:
        if self.engine_devices > 1 and self.device == "cuda":
            raise ConfigError(
                "'engine_args' asks for several devices, but 'device' is cuda without a number; set"
                " 'device' to the first of them, such as cuda:0"
            )
        if self.engine_python is None:
            raise ConfigError(
                "'engine' is vllm, which requires 'engine_python': run `tideserve engine install"
                " vllm` and set the path that it prints"
            )
        if self.load_format == "dummy":
            raise ConfigError(
                "'load_format' is dummy, but for vLLM the KV cache is sized by the weights in"
                " files; remove it"
            )
        if self.dtype == "float64":
            raise ConfigError(
                "'dtype' is float64, which vLLM does not support; choose bfloat16 or float32"
            )
        self._check_own_options("vLLM")
