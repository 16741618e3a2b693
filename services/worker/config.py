"""Configuration of a worker."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.common.service_config import ServiceConfig
from services.common.setting import PAGE_BYTES
from services.core.engine_kind import EngineKind
from services.core.line_order import Scheduling
from services.core.planner.config import GPU_LIMITS, IterationConfig
from services.core.planner.victims import VictimRule
from services.core.setting import choice, device_name, nested, number, option, size, tcp_port

# Kinds of device that a worker has a memory backend for.
DEVICES = ("cpu", "cuda")
# Only tideserve's own engine has these, and only if they are set.
OWN_ENGINE_OPTIONS = ("chunk_bytes", "event_log", "paced")
# vLLM's kernels for CPUs need blocks of a multiple of 32 tokens.
VLLM_DEFAULTS: Mapping[str, int] = {
    "block_size": 32,
    "max_batch_tokens": GPU_LIMITS["max_batch_tokens"],
}


def only_cpus(torch_version: str) -> str:
    """What is said of a torch that cannot use the GPU that was asked for."""
    return (
        f"this is torch {torch_version}, which computes on CPUs alone; install its build for CUDA"
        " (`make clean`, then `make serve` without TORCH_INDEX; docs/gpus.md), or take --device out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """What a worker serves, on which device, within which memory."""

    worker_id: str = option(
        "", "Name of this worker, alone in its cluster; empty: the name of the host."
    )
    model_name: str = option(help="Name that clients send.")
    model_dir: Path = option(help="Folder with config.json, tokenizer.json and safetensors.")
    run_dir: Path | None = option(
        None,
        "Private folder for the socket between servicer and engine; none: a new one among the"
        " temporary files, removed at the end.",
    )
    memory_bytes: int = size(
        help="Device memory of a worker: parameters, KV cache and staging together.",
        minimum=1,
        maximum=2**50,
    )
    host: str = option("127.0.0.1", "Address to listen on for gRPC and lanes.")
    port: int = tcp_port(0, "Port of gRPC; 0: any free one.")
    engine: str = choice(
        "tideserve",
        EngineKind,
        "What runs the model: tideserve's own engine, or vLLM in an environment of its own, which"
        " serves alone: it never merges or drops layers.",
    )
    engine_python: Path | None = option(
        None,
        "Python of the environment that has vLLM; `tideserve engine install vllm` makes it and"
        " prints the path.",
        default_text="none; `engine: vllm` needs one",
    )
    location: str = option(
        "",
        "Where the worker is, from the widest part to the narrowest, such as zone/rack/host:"
        " workers that are near each other merge first. Empty: its host is all that is known.",
    )
    activation_port: int = tcp_port(0, "Port of the lane for activations; 0: any free one.")
    bulk_port: int = tcp_port(0, "Port of the lane for KV and parameters; 0: any free one.")
    device: str = device_name("cpu", "Device that computes.")
    dtype: str = choice(
        "bfloat16", ("bfloat16", "float32", "float64"), "Type of weights, activations and KV."
    )
    load_format: str = choice(
        "auto", ("auto", "dummy"), "auto: weights of the model's files; dummy: random ones."
    )
    chunk_bytes: int | None = size(
        None,
        "Size of a chunk of device memory, such as 2MiB.",
        minimum=PAGE_BYTES,
        maximum=2**30,
        multiple_of=PAGE_BYTES,
        default_text="chosen by the sizes of the model",
        expert=True,
    )
    planner: IterationConfig = nested(IterationConfig())
    max_model_len: int | None = number(
        None,
        "Longest prompt and answer together, in tokens.",
        minimum=1,
        maximum=2**31 - 1,
        default_text="what the model and the KV cache allow",
    )
    threads: int = number(
        1,
        "Compute threads. The compiled kernels of tideserve's engine need 1; with more, torch alone"
        " computes.",
        minimum=1,
        maximum=1024,
    )
    start_timeout_s: float = number(
        600.0, "Seconds that loading the model may take.", minimum=1, maximum=86400
    )
    coordinated_exchange: bool = option(
        True, "Whether bulk transfers (KV, parameters) yield to activations.", expert=True
    )
    link_bytes_per_s: int = size(
        10**9,
        "What the network carries between two workers at least, in bytes per second (10 Gbit/s are"
        " 1250000000). By it an exchange of KV begins; what more the network carries is measured. A"
        " peer that sends parameters at less than a quarter of it is given up for the folder.",
        minimum=1,
        maximum=2**50,
    )
    ucx_transports: str = option(
        "sm,tcp", "UCX_TLS between engines, such as rc,sm,tcp for RDMA between hosts."
    )
    ucx_devices: str = option(
        "", "UCX_NET_DEVICES between engines; empty: the loopback if `host` is, else all."
    )
    ucx_ports: str = option(
        "",
        "UCX_TCP_PORT_RANGE between engines, such as 50063-50066: two ports per network device, for"
        " networks that let only some through; empty: any free ones.",
    )
    engine_unready_s: float = number(
        10.0,
        "Seconds without a sign of life after which an engine gets no new requests. After half of"
        " them, and 1.5 s, its requests go on at another worker. One of tideserve gives signs also"
        " while an iteration runs; vLLM may be silent for ten times as long as it was lately.",
        minimum=1,
        maximum=3600,
    )
    engine_dead_s: float = number(
        60.0,
        "Seconds after which an engine that says nothing ends the worker: longer than any iteration"
        " takes, which is bounded by max_batch_tokens.",
        minimum=1,
        maximum=86400,
        expert=True,
    )
    drain_timeout_s: float = number(
        30.0, "Seconds that running requests may go on after SIGTERM.", minimum=0, maximum=86400
    )
    paced: str | None = option(
        None,
        "Device profile, by name or file, to whose times iterations are padded, such as A100-14B;"
        " A100-14B:2 is half as fast.",
    )
    profile_dir: Path | None = option(None, "Folder of measured profiles; none: they are not kept.")
    profile_when_idle: bool = option(True, "Whether an idle worker profiles itself.", expert=True)

    @staticmethod
    def defaults_for(given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that suit the engine and device.

        A batch has room for one token of every running request: of `max_running` and
        `max_batch_tokens`, one that is not given follows the other.
        """
        defaults: dict[str, Any] = {}
        if given.get("engine") == EngineKind.VLLM:
            defaults = dict(VLLM_DEFAULTS)
        elif given.get("device", "cpu") != "cpu":
            defaults = dict(GPU_LIMITS)
        usual = IterationConfig()
        limits = {**defaults, **given}
        running = limits.get("max_running", usual.max_running)
        tokens = limits.get("max_batch_tokens", usual.max_batch_tokens)
        if running > tokens:
            defaults |= {"max_running": tokens, "max_batch_tokens": running}
        return defaults

    @property
    def location_parts(self) -> tuple[str, ...]:
        """`location`, part by part."""
        return tuple(part for part in self.location.split("/") if part)

    def __post_init__(self) -> None:
        # Without `super`: a dataclass with slots is another class than the one in its body.
        ServiceConfig.__post_init__(self)
        if self.planner.scheduling is not Scheduling.SLO:
            self._check_parts()
        if self.engine == EngineKind.VLLM:
            self._check_vllm()
        elif self.engine_python is not None:
            raise ConfigError(
                "'engine_python' is for `engine: vllm`; take it out, or set 'engine' to 'vllm'"
            )

    def _check_parts(self) -> None:
        """Nothing that only `slo` has is set: it would do nothing, and nobody would notice."""
        planner = self.planner
        parts = {"packing": planner.packing, "adaptive_slots": planner.adaptive_slots}
        parts["victims"] = planner.victims is not VictimRule.NEWEST
        for name in (name for name, is_set in parts.items() if is_set):
            raise ConfigError(
                f"'{name}' does nothing with `scheduling: {planner.scheduling}`; take it out, or"
                " set 'scheduling' to 'slo'"
            )

    def _check_vllm(self) -> None:
        if self.engine_python is None:
            raise ConfigError(
                "'engine' is vllm, which needs 'engine_python': run `tideserve engine install vllm`"
                " and give the path that it prints"
            )
        if self.load_format == "dummy":
            raise ConfigError(
                "'load_format' is dummy, but vLLM is given the memory beside the weights of files;"
                " take it out"
            )
        if self.dtype == "float64":
            raise ConfigError(
                "'dtype' is float64, which vLLM does not compute in; choose bfloat16 or float32"
            )
        for name in OWN_ENGINE_OPTIONS:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"'{name}' is for tideserve's own engine and does nothing with vLLM; take it"
                    " out, or set 'engine' to 'tideserve'"
                )
