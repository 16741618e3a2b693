"""What a worker reports of itself: one vocabulary for engine, scheduler, memory manager and status.

An engine tells its servicer an `EngineReport`. The servicer makes two reports of it: a `LoadReport`
for the scheduler, and a `MemoryReport` for the memory manager, which shows it in its turn.
"""

from dataclasses import dataclass, field

from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.cost.iteration_tokens import IterationTokens


@dataclass(frozen=True, slots=True)
class ClassTokens:
    """Tokens that a planner's iterations have computed so far; online: all classes but `batch`.

    Processed are prompt tokens that ran for the first time, and output tokens. Recomputed are those
    that ran again, since their KV was lost. Tokens found in the prefix cache are neither.
    """

    online_processed_tokens_total: int = 0
    online_recomputed_tokens_total: int = 0
    batch_processed_tokens_total: int = 0
    batch_recomputed_tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a planner is, and what it has done so far.

    `running` sequences have blocks; `waiting` ones need `kv_blocks_wanted` before they can run.
    `kv_blocks_total` are those of the smallest stage. `preemptions_total` counts the times that a
    sequence lost its blocks, `prompt_tokens_total` the tokens of the prompts whose first output
    token came from here. `batch_running`, `batch_waiting` and `kv_blocks_batch` are what the class
    `batch` has of those. If `batch_yields`, it gives its blocks to online requests: then it has no
    part in `kv_blocks_wanted`, and is no demand. Cached blocks are free ones.
    `prefill_tokens` are to be computed before the next outputs of those that do not decode.
    `prefix_queries_total` are the prompt tokens of requests looked up in the prefix cache when
    they started, `prefix_hits_total` those that were found. `preempted_iterations_total` counts
    the iterations of batch work alone that were interrupted between layers,
    `resumed_iterations_total` the times that one went on where it was. `discarded_tokens_total` are
    the tokens of all interrupted iterations that had to run again from their first layer.
    """

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_wanted: int
    preemptions_total: int = 0
    kv_blocks_total: int = 0
    prompt_tokens_total: int = 0
    batch_running: int = 0
    batch_waiting: int = 0
    kv_blocks_batch: int = 0
    prefill_tokens: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0
    batch_yields: bool = False
    preempted_iterations_total: int = 0
    resumed_iterations_total: int = 0
    discarded_tokens_total: int = 0
    tokens: ClassTokens = field(default_factory=ClassTokens)

    @property
    def kv_blocks_yielding(self) -> int:
        """Blocks that are free as soon as an online request needs them."""
        return self.kv_blocks_batch if self.batch_yields else 0

    @property
    def waiting_demand(self) -> int:
        """Sequences that wait and may trigger a drop."""
        return self.waiting - self.batch_waiting if self.batch_yields else self.waiting


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine tells of itself; times and counts are sums since it started.

    `epoch` is that of the configuration that it runs, 0 before the first one. `unsettled`: the
    change that led to it is not over, so that other members may wait for this engine.
    `parameter_bytes` is the device memory behind parameters. `stage` is the time spent as a stage
    of pipelines, `iterations` that of all iterations, `iteration_tokens` their tokens;
    `slowest_iteration_s` is the time of the slowest one lately, in which an engine answers nothing.
    `trouble`: why its group cannot go on as it is, for people; "" if it can. `left`: its group goes
    on without it, so that its requests are over here.
    """

    load: Load
    epoch: int = 0
    unsettled: bool = False
    parameter_bytes: int = 0
    stage: StageTime = field(default_factory=StageTime)
    iterations: IterationTime = field(default_factory=IterationTime)
    iteration_tokens: IterationTokens = field(default_factory=IterationTokens)
    trouble: str = ""
    left: bool = False
    slowest_iteration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load, for dispatch; on the wire `WorkerLoad` in load.proto.

    Of two of one `incarnation` that with the higher `number` is the newer one. `epoch` is that of
    the configuration in which requests find the worker. `received_request_ids` are the requests
    that arrived there since its last report to the scheduler or the one before; so are
    `dropped_prefixes` the thin hashes of blocks that it has dropped from its prefix cache. With the
    last of them it has told of `dropped_total`, so that a reader can tell which it has seen.
    """

    worker_id: str
    incarnation: str
    number: int
    epoch: int
    load: Load
    received_request_ids: tuple[str, ...] = ()
    dropped_prefixes: tuple[int, ...] = ()
    dropped_total: int = 0


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A worker's memory, for overload and status; on the wire `WorkerMemory` in memmgr.proto.

    `budget_bytes` of device memory hold parameters, KV and `staging_bytes`; `kv_block_bytes` is the
    KV of one block in all layers. `pids` are the processes of servicer and engine. `engine_hung`:
    the engine stands still, and `engine` is what was known of it last.
    """

    worker_id: str
    incarnation: str
    pids: tuple[int, ...]
    budget_bytes: int
    staging_bytes: int
    kv_block_bytes: int
    engine: EngineReport
    engine_hung: bool = False
