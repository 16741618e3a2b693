"""Pipelines of simulated groups: run times and utilisation of their stages; log of changes."""

from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from services.core.changeover.frames import Activations, activations
from services.core.cost.bubble import Interval, bubble_share
from services.core.cost.padded import Execution
from services.core.overload.events import Decision
from services.core.planner.batch import IterationShape, Microbatch
from tideserve.sim.network import MESSAGE_BYTES
from tideserve.sim.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class StageRun:
    """A microbatch on its way through the stages of `pipeline`."""

    frame: Activations
    shape: IterationShape
    tokens: int
    pipeline: "Pipeline"

    @property
    def size_bytes(self) -> int:
        """Bytes that a stage sends to the next one."""
        return MESSAGE_BYTES + self.tokens * self.pipeline.hidden_bytes


class Pipeline:
    """A group of several stages at one epoch.

    `shares`: each stage's share of the model's time; `hidden_bytes`: size of a token's activation;
    `execution`: how its engines pad.
    """

    def __init__(
        self, shares: Row[float], time_model: TimeModel, hidden_bytes: int, execution: Execution
    ) -> None:
        self.hidden_bytes = hidden_bytes
        self._execution = execution
        self._shares = tuple(shares)
        self._time_model = time_model
        # Run times of the microbatches, by stage.
        self._intervals: list[list[Interval]] = [[] for _ in shares]

    def run_of(self, microbatch: Microbatch) -> StageRun:
        """Return what the stages need to run a microbatch."""
        frame = activations(microbatch, vacant_s=0.0)
        return StageRun(frame, shape_of(microbatch, self._execution), microbatch.batch.tokens, self)

    def seconds(self, stage: int, run: StageRun) -> float:
        """Return how long a stage runs a microbatch; an empty microbatch takes no time."""
        return self._time_model.stage_s(run.shape, self._shares[stage]) if run.tokens else 0.0

    def note_run(self, stage: int, run: StageRun, interval: Interval) -> None:
        """Record that a stage has run a microbatch."""
        if run.tokens:
            self._intervals[stage].append(interval)

    def busy(self) -> tuple[float, float]:
        """Return the seconds in which stages ran, and in which the pipeline had work for them.

        The pipeline has work while any microbatch is in it; the quotient is `1 - bubble_share`.
        """
        # Microbatches that have not passed all stages are left out.
        complete = min(map(len, self._intervals))
        stages = [stage[:complete] for stage in self._intervals]
        busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
        share = 1.0 - bubble_share(stages)
        return busy_s, busy_s / share if share else 0.0


def shape_of(microbatch: Microbatch, execution: Execution) -> IterationShape:
    """Return the sizes of a microbatch as a time model needs them."""
    chunks = microbatch.batch.chunks
    return IterationShape.of(
        [chunk.start for chunk in chunks if len(chunk.token_ids) == 1],
        [(chunk.start, len(chunk.token_ids)) for chunk in chunks if len(chunk.token_ids) > 1],
        execution,
    )


@dataclass(slots=True)
class ChangeRecord:
    """A committed merge or split; times are in seconds of the simulation.

    `freed_bytes`: parameter memory that became KV cache, negative after a restore. `settled_s`:
    when the exchange of `moved_bytes` of KV was complete; None if it was not by the end.
    """

    workers: tuple[str, ...]
    is_merge: bool
    freed_bytes: int
    decided_s: float
    committed_s: float
    settled_s: float | None = None
    moved_bytes: int = 0
    _unsettled: set[str] = field(default_factory=set)


@dataclass(slots=True)
class ChangeLog:
    """All changes, in order of their commits, and all decisions of the monitor.

    `failed`: changes that were requested but not committed, by reason. The stages of pipelines ran
    for `busy_s` of the `present_s` seconds in which their pipeline had work. `shipped` requests
    moved between single workers, with `shipped_bytes` of KV; `shipped_none` orders moved none.
    """

    changes: list[ChangeRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    busy_s: float = 0.0
    present_s: float = 0.0
    shipped: int = 0
    shipped_bytes: int = 0
    shipped_none: int = 0
    _of_worker: dict[str, ChangeRecord] = field(default_factory=dict)  # latest, by worker

    def note_committed(self, record: ChangeRecord) -> None:
        """Record the commit of a change, after which its workers change over."""
        self.changes.append(record)
        record._unsettled.update(record.workers)
        self._of_worker |= dict.fromkeys(record.workers, record)

    def note_failed(self, reason: str) -> None:
        """Record a change that failed."""
        self.failed[reason] = self.failed.get(reason, 0) + 1

    def note_moved(self, worker_id: str, size_bytes: int) -> None:
        """Record that a worker begins to send KV in its latest change."""
        self._of_worker[worker_id].moved_bytes += size_bytes

    def note_settled(self, worker_id: str, now_s: float) -> None:
        """Record that a worker has completed its latest change."""
        record = self._of_worker.get(worker_id)
        if record is None or worker_id not in record._unsettled:
            return
        record._unsettled.remove(worker_id)
        if not record._unsettled:
            record.settled_s = now_s

    def has_settled(self, worker_id: str) -> bool:
        """Return whether a worker has completed its latest change."""
        record = self._of_worker.get(worker_id)
        return record is None or worker_id not in record._unsettled

    def note_pipelines(self, pipelines: Iterable[Pipeline]) -> None:
        """Add up the utilisation of pipelines that have ended."""
        for pipeline in pipelines:
            busy_s, present_s = pipeline.busy()
            self.busy_s += busy_s
            self.present_s += present_s
