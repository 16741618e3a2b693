"""Reports of a worker's load and memory, shared by worker, scheduler and memory manager.

A worker consists of an engine process and a *servicer* process, which serves its gRPC API. The
engine sends an `EngineReport` to the servicer. The servicer derives a `LoadReport` for the
scheduler and a `MemoryReport` for the memory manager, which also shows it to operators.

Terms: the *epoch* numbers the configurations (members and stages) of a group. An *incarnation* is
a start of a worker process. Thin hashes are hashes of every n-th block of a prompt.
"""

from dataclasses import dataclass, field

from services.core.adapter import NO_ADAPTERS, AdapterUse
from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.histogram import Histogram


@dataclass(frozen=True, slots=True)
class ClassTokens:
    """Tokens computed by a worker's iterations so far; online: all classes except `batch`.

    Processed tokens are prompt tokens that ran for the first time, and output tokens. Recomputed
    tokens ran again because their KV was lost. Hits of the prefix cache count as neither.
    """

    online_processed_tokens_total: int = 0
    online_recomputed_tokens_total: int = 0
    batch_processed_tokens_total: int = 0
    batch_recomputed_tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """Current load and cumulative counters of a worker.

    `running` sequences hold KV blocks; `waiting` sequences need `kv_blocks_wanted` blocks before
    they can run. `kv_blocks_total` is the capacity of the pipeline stage with the fewest blocks;
    blocks that only hold cached prefixes count as free. `preemptions_total` counts how often a
    sequence lost its blocks, `prompt_tokens_total` the prompt tokens of sequences whose first
    output token was sampled here. `batch_running`, `batch_waiting` and `kv_blocks_batch` are the
    share of the class `batch`. `batch_yields`: batch sequences are preempted if online requests
    need their blocks; `kv_blocks_wanted` then excludes them, and they trigger no drop.
    `prefill_tokens` are still to be computed for sequences that do not decode yet.
    `prefix_queries_total` counts the prompt tokens looked up in the prefix cache when requests
    started, `prefix_hits_total` those found. `preempted_iterations_total` counts batch-only
    iterations that were interrupted between layers, `resumed_iterations_total` how often such an
    iteration continued at its layer. `discarded_tokens_total` counts the tokens of interrupted
    iterations that had to run again from the first layer. `sequences_max`: most sequences that may
    run and wait at once; 0: no limit but KV blocks. `host_blocks_total`: KV blocks that host memory
    has room for so far. `shared_tails_total` counts the last blocks of batch sequences that online
    sequences have shared (`planner/shared_tails.py`), `lost_tail_tokens_total` the tokens in those
    that the batch sequences lost, which had to run again.
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
    sequences_max: int = 0
    host_blocks_total: int = 0
    shared_tails_total: int = 0
    lost_tail_tokens_total: int = 0
    tokens: ClassTokens = field(default_factory=ClassTokens)
    adapter_use: AdapterUse = NO_ADAPTERS

    @property
    def kv_blocks_yielding(self) -> int:
        """Blocks that batch sequences yield as soon as an online request needs them."""
        return self.kv_blocks_batch if self.batch_yields else 0

    @property
    def waiting_demand(self) -> int:
        """Waiting sequences that may trigger a drop: a merge of groups that frees memory."""
        return self.waiting - self.batch_waiting if self.batch_yields else self.waiting


@dataclass(frozen=True, slots=True)
class DeadlineUse:
    """Use of the time before deadlines so far, by policies with deadlines such as `slo`.

    `harvest_share` is the present share of the slack that batch work may use. `budget_s` sums the
    times that the next deadline left for the iterations planned to meet it, `budget_used_s` their
    durations. `missed_ttft` and `missed_tpot` count missed deadlines by class; those of TPOT once
    per token group.
    """

    harvest_share: float = 0.0
    budget_s: float = 0.0
    budget_used_s: float = 0.0
    missed_ttft: dict[str, int] = field(default_factory=dict)
    missed_tpot: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ShipmentCounts:
    """Requests that changed workers with their KV, since the engine's start.

    `shipped_total` requests moved away, `received_total` started here with KV of another worker,
    and `kept_total` stayed because their move failed. `shipped_blocks_total` KV blocks were sent.
    `handed_over_total` further requests left after their first output token, and
    `hand_overs_kept_total` were to leave then and decode here. `shipping_s`: seconds during which
    KV of any of them was being sent.
    """

    shipped_total: int = 0
    received_total: int = 0
    kept_total: int = 0
    shipped_blocks_total: int = 0
    handed_over_total: int = 0
    hand_overs_kept_total: int = 0
    shipping_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostReport:
    """KV in host memory, and what was copied since the engine's start.

    `host_bytes` of memory are backed; preempted requests need `host_blocks_owed` of the blocks.
    `saved_blocks_total` blocks were copied to the host, and `recall_jobs_total` times blocks were
    copied back, for `recalled_tokens_total` tokens; `host_hit_tokens_total` of these are of prompts
    that had not run here before. `host_failures_total` counts damaged copies and losses of all.
    """

    host_bytes: int = 0
    host_blocks_owed: int = 0
    saved_blocks_total: int = 0
    save_bytes_total: int = 0
    recall_jobs_total: int = 0
    recalled_tokens_total: int = 0
    host_hit_tokens_total: int = 0
    host_failures_total: int = 0


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Report of an engine; times and counts are sums since the engine started.

    `epoch` is that of its current configuration, 0 before the first. `unsettled`: the engine has
    not finished the change to this configuration, so other members may wait for it.
    `parameter_bytes` is the device memory of parameters. `stage` is the time spent as a pipeline
    stage, `iterations` that of all iterations, `iteration_tokens` their tokens;
    `slowest_iteration_s` is the duration of the slowest recent iteration, during which an engine
    answers no message. `trouble`: human-readable reason why its group cannot continue; "" if it
    can. `left`: the group continues without this engine, whose requests have ended here.
    `restored_slabs`: parameter slabs (layers, embedding, head) that were dropped and restored, by
    source: `host` (own copy in host memory), `peer` (another worker) or `disk` (model folder).
    `deadlines` are those of requests that it leads; `preemption_s` are the times from the arrival
    of an online request until a batch-only iteration yielded to it.
    `cost_model` is the origin of its cost model: `paced`, `profile` (stored), `start` (measured at
    the start), `idle` (while idle), `load` (refined), or `none: REASON`; "" if it does not report.
    `upstream` describes the server that runs the model instead of this worker, "" without one.
    `outage`: human-readable reason why that server computes nothing; "" if it does.
    """

    load: Load
    epoch: int = 0
    unsettled: bool = False
    parameter_bytes: int = 0
    stage: StageTime = field(default_factory=StageTime)
    iterations: IterationTime = field(default_factory=IterationTime)
    iteration_tokens: Histogram = field(default_factory=Histogram)
    trouble: str = ""
    left: bool = False
    slowest_iteration_s: float = 0.0
    restored_slabs: dict[str, int] = field(default_factory=dict)
    cost_model: str = ""
    deadlines: DeadlineUse = field(default_factory=DeadlineUse)
    preemption_s: Histogram = field(default_factory=Histogram)
    shipments: ShipmentCounts = field(default_factory=ShipmentCounts)
    host: HostReport = field(default_factory=HostReport)
    upstream: str = ""
    outage: str = ""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load, for dispatch; on the wire `WorkerLoad` in load.proto.

    Within an `incarnation`, a higher `number` is newer. `epoch` is that of the configuration under
    which the worker accepts requests. `received_request_ids` are the requests that arrived in the
    last two reporting intervals; `dropped_prefixes` are the thin hashes of blocks that its prefix
    cache evicted in the same time. `dropped_total` counts all evictions up to the last of these, so
    that the scheduler can skip those that an earlier report contained.
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
class OtherRoom:
    """Room for the requests of a worker that shuts down, in the other groups of its model.

    `longest_tokens` is the longest sequence that one of them can hold; 0: there is none.
    `group_tokens` is the free KV, in tokens, of each group that can start requests now and has no
    prefill backlog.
    """

    longest_tokens: int = 0
    group_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """A worker's memory, for overload handling and status pages; `WorkerMemory` in memmgr.proto.

    `budget_bytes` of device memory hold parameters, KV blocks and `staging_bytes` of buffers;
    `kv_block_bytes` is the size of a KV block in all layers. `pids` are the processes of servicer
    and engine. `engine_hung`: the engine does not respond; `engine` is then its last report.
    """

    worker_id: str
    incarnation: str
    pids: tuple[int, ...]
    budget_bytes: int
    staging_bytes: int
    kv_block_bytes: int
    engine: EngineReport
    engine_hung: bool = False
