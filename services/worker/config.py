"""Configuration of a worker."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import PAGE_BYTES, choice, device_name, number, option, size, tcp_port
from services.common.errors import ConfigError
from services.common.scheduling_config import SchedulingConfig
from services.core.engine_kind import EngineKind
from services.core.line_order import Scheduling
from services.core.overtaking import OVERTAKEN_MAX
from services.core.planner.config import BatchFormation
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.victims import VictimRule

# Kinds of device that a worker has a memory backend for.
DEVICES = ("cpu", "cuda")
# Only tideserve's own engine has these, and only if they are set.
OWN_ENGINE_OPTIONS = ("chunk_bytes", "event_log", "paced")


def only_cpus(torch_version: str) -> str:
    """What is said of a torch that cannot use the GPU that was asked for."""
    return (
        f"this is torch {torch_version}, which computes on CPUs alone; install its build for CUDA"
        " (`make clean`, then `make serve` without TORCH_INDEX; docs/gpus.md), or take --device out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(SchedulingConfig):
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
    block_size: int = number(16, "Tokens in a KV block.", minimum=1, maximum=1024)
    chunk_bytes: int | None = size(
        None,
        "Size of a chunk of device memory, such as 2MiB.",
        minimum=PAGE_BYTES,
        maximum=2**30,
        multiple_of=PAGE_BYTES,
        default_text="chosen by the sizes of the model",
    )
    # The next tokens come once an iteration has ended, so a slow device gets small ones. With vLLM
    # an abort waits for that, too.
    max_batch_tokens: int = number(
        256,
        "Tokens of one iteration; more raise throughput and the time between tokens.",
        minimum=1,
        maximum=2**20,
    )
    max_model_len: int | None = number(
        None,
        "Longest prompt and answer together, in tokens.",
        minimum=1,
        maximum=2**31 - 1,
        default_text="what the model and the KV cache allow",
    )
    max_running: int = number(128, "Requests that run at once.", minimum=1, maximum=2**16)
    max_waiting: int = number(
        4096, "Requests that may wait in the worker.", minimum=1, maximum=2**20
    )
    overtaken_max: int = number(
        OVERTAKEN_MAX,
        "How often a waiting request may be overtaken by later ones that fit where it does not;"
        " 0: never.",
        minimum=0,
        maximum=2**20,
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
    batch_formation: str = choice(
        "lookahead",
        BatchFormation,
        "How a pipeline's microbatches are formed: by equal cost, looking ahead, or by token"
        " count.",
    )
    min_microbatch_tokens: int = number(
        128, "Tokens below which a microbatch is not divided.", minimum=1, maximum=2**20
    )
    fill_max: float = number(
        0.4,
        "With scheduling slo: the largest part of the time between what online requests cost and"
        " their deadlines that batch work gets; 0 leaves it only times without online requests.",
        minimum=0,
        maximum=1,
    )
    offline_iteration_s: float = number(
        2.0,
        "With scheduling slo: seconds that an iteration of batch work alone may take; less where"
        " first tokens are promised sooner and nothing interrupts it (preempt).",
        minimum=0.001,
        maximum=3600,
    )
    online_chunk_tokens: int | None = number(
        None,
        "With scheduling slo: tokens of an iteration that online requests get for their prompts"
        " whatever is due.",
        minimum=1,
        maximum=2**20,
        default_text="max_batch_tokens",
    )
    packing: bool = option(
        False,
        "With scheduling slo: whether a batch request that finds no time beside online ones takes"
        " the turn of one whose deadline holds without it.",
    )
    adaptive_slots: bool = option(
        False,
        "With scheduling slo: whether the sequences of an iteration with both kinds are bounded,"
        " by half of max_running after an iteration that a deadline has bound, and by twice as many"
        " after each other one.",
    )
    victims: str = choice(
        "newest",
        VictimRule,
        "With scheduling slo: which online request loses its KV when all of batch requests is"
        " taken: the newest one, or the one whose next token is due last.",
    )
    preempt: str = choice(
        "off",
        Preempt,
        "When an online request interrupts an iteration of batch work between two layers, in a"
        " group of one: never, if its deadline would be missed, or always.",
    )
    preempted_work: str = choice(
        "resume",
        PreemptedWork,
        "What becomes of an interrupted iteration: it goes on later at the layer where it was, or"
        " runs again.",
    )
    shelf_max_s: float = number(
        60.0,
        "Seconds for which batch requests rest at a worker that does not lead its merged group,"
        " before the leader gets them; 0: it gets them at once. With `scheduling: fcfs` they move"
        " as all others.",
        minimum=0,
        maximum=86400,
    )
    spread_after_loss: bool = option(
        True,
        "Whether the leader of a merged group that has lost a member gives the younger part of its"
        " requests back, so that its former members compute them again, too. Their gateways go on"
        " with them after the tokens that have come, unless they have `resume_streams: false`.",
    )
    prefix_caching: bool = option(
        True,
        "Automatic prefix caching: requests with a common prefix share its KV blocks, which stay"
        " cached until their memory is needed.",
    )
    coordinated_exchange: bool = option(
        True, "Whether bulk transfers (KV, parameters) yield to activations."
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
    profile_when_idle: bool = option(True, "Whether an idle worker profiles itself.")

    @property
    def location_parts(self) -> tuple[str, ...]:
        """`location`, part by part."""
        return tuple(part for part in self.location.split("/") if part)

    def __post_init__(self) -> None:
        # Without `super`: a dataclass with slots is another class than the one in its body.
        SchedulingConfig.__post_init__(self)
        if self.max_running > self.max_batch_tokens:
            raise ConfigError(
                f"'max_running' is {self.max_running}, but must not exceed 'max_batch_tokens' "
                f"({self.max_batch_tokens}): every running request decodes one token an iteration"
            )
        if self.scheduling != Scheduling.SLO:
            self._check_parts()
        if self.engine == EngineKind.VLLM:
            self._check_vllm()
        elif self.engine_python is not None:
            raise ConfigError(
                "'engine_python' is for `engine: vllm`; take it out, or set 'engine' to 'vllm'"
            )

    def _check_parts(self) -> None:
        """Nothing that only `slo` has is set: it would do nothing, and nobody would notice."""
        parts = {"packing": self.packing, "adaptive_slots": self.adaptive_slots}
        parts["victims"] = self.victims != VictimRule.NEWEST
        for name in (name for name, is_set in parts.items() if is_set):
            raise ConfigError(
                f"'{name}' does nothing with `scheduling: {self.scheduling}`; take it out, or set"
                " 'scheduling' to 'slo'"
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
