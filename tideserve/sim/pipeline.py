"""A simulated group of several stages at one epoch: how long each runs, and how busy they are."""

from collections.abc import Iterable
from collections.abc import Sequence as Row
from dataclasses import dataclass, field

from services.core.changeover.frames import Activations, activations
from services.core.cost.bubble import Interval, bubble_share
from services.core.overload.events import Decision
from services.core.planner.batch import IterationShape, Microbatch
from tideserve.sim.network import MESSAGE_BYTES
from tideserve.sim.time_model import TimeModel


@dataclass(frozen=True, slots=True)
class StageRun:
    """A microbatch as the stages of `pipeline` run it, one after the other."""

    frame: Activations
    shape: IterationShape
    tokens: int
    pipeline: "Pipeline"

    @property
    def size_bytes(self) -> int:
        """Bytes that a stage sends to the next one."""
        return MESSAGE_BYTES + self.tokens * self.pipeline.hidden_bytes


class Pipeline:
    """`shares`: of each stage in the time of the model. `hidden_bytes`: of a token's activation."""

    def __init__(self, shares: Row[float], time_model: TimeModel, hidden_bytes: int) -> None:
        self.hidden_bytes = hidden_bytes
        self._shares = tuple(shares)
        self._time_model = time_model
        self._intervals: list[list[Interval]] = [[] for _ in shares]

    def run_of(self, microbatch: Microbatch) -> StageRun:
        """What the stages get of a microbatch."""
        frame = activations(microbatch, vacant_s=0.0)
        return StageRun(frame, shape_of(microbatch), microbatch.batch.tokens, self)

    def seconds(self, stage: int, run: StageRun) -> float:
        """How long a stage runs a microbatch; one without chunks takes no time."""
        return self._time_model.stage_s(run.shape, self._shares[stage]) if run.tokens else 0.0

    def note_run(self, stage: int, run: StageRun, interval: Interval) -> None:
        """A stage has run a microbatch."""
        if run.tokens:
            self._intervals[stage].append(interval)

    def busy(self) -> tuple[float, float]:
        """Seconds in which the stages ran something, and in which they could have.

        They could while a microbatch was anywhere between them; their share is `1 - bubble_share`.
        """
        complete = min(map(len, self._intervals))
        stages = [stage[:complete] for stage in self._intervals]
        busy_s = sum(end_s - start_s for stage in stages for start_s, end_s in stage)
        share = 1.0 - bubble_share(stages)
        return busy_s, busy_s / share if share else 0.0


def shape_of(microbatch: Microbatch) -> IterationShape:
    """The sizes for a time model."""
    chunks = microbatch.batch.chunks
    decodes = [chunk.start for chunk in chunks if len(chunk.token_ids) == 1]
    return IterationShape(
        len(decodes),
        sum(decodes),
        tuple([(one.start, len(one.token_ids)) for one in chunks if len(one.token_ids) > 1]),
    )


@dataclass(slots=True)
class ChangeRecord:
    """A merge or split that was committed; times in seconds of the simulation.

    `freed_bytes` of parameters became KV, negative where they came back. `settled_s` is when all KV
    is where it runs, after `moved_bytes` of it have moved; None for a change that did not end.
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
    """All changes, in the order of their commits, and all decisions of the monitor.

    `failed`: what was asked for and not committed, by reason. `busy_s` of `present_s` seconds did
    the stages of pipelines run something while a microbatch was anywhere between them.
    """

    changes: list[ChangeRecord] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    busy_s: float = 0.0
    present_s: float = 0.0
    _of_worker: dict[str, ChangeRecord] = field(default_factory=dict)  # its newest

    def note_committed(self, record: ChangeRecord) -> None:
        """A change is committed; its workers will change over."""
        self.changes.append(record)
        record._unsettled.update(record.workers)
        self._of_worker |= dict.fromkeys(record.workers, record)

    def note_failed(self, reason: str) -> None:
        """A change came to nothing."""
        self.failed[reason] = self.failed.get(reason, 0) + 1

    def note_moved(self, worker_id: str, size_bytes: int) -> None:
        """A worker begins to send KV of its newest change."""
        self._of_worker[worker_id].moved_bytes += size_bytes

    def note_settled(self, worker_id: str, now_s: float) -> None:
        """A worker is done with its newest change."""
        record = self._of_worker.get(worker_id)
        if record is None or worker_id not in record._unsettled:
            return
        record._unsettled.remove(worker_id)
        if not record._unsettled:
            record.settled_s = now_s

    def has_settled(self, worker_id: str) -> bool:
        """Whether a worker is done with its newest change."""
        record = self._of_worker.get(worker_id)
        return record is None or worker_id not in record._unsettled

    def note_pipelines(self, pipelines: Iterable[Pipeline]) -> None:
        """These pipelines have ended."""
        for pipeline in pipelines:
            busy_s, present_s = pipeline.busy()
            self.busy_s += busy_s
            self.present_s += present_s
