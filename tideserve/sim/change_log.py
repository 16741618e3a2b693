"""What the changes of groups in a simulation did and took."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.overload.events import Decision
from tideserve.sim.pipeline import Pipeline


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
