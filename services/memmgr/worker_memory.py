"""The latest memory report of every registered worker."""

from dataclasses import dataclass

from services.common.clock import monotonic_s
from services.core.report import EngineReport, MemoryReport


@dataclass(slots=True)
class Standing:
    """Since when a worker serves an epoch, and since when that change is over for it."""

    epoch: int
    served_s: float
    settled_s: float | None = None


REPORT_FRESH_S = 3.0
"""A worker that has not reported for so long may be frozen; it reports once a second at least."""


class MemoryView:
    """Keeps one report per registered worker, so it is bounded by their number."""

    def __init__(self) -> None:
        self._registered: dict[str, str] = {}
        self._latest: dict[str, MemoryReport] = {}
        self._heard_s: dict[str, float] = {}
        self._standings: dict[str, Standing] = {}

    def set_registered(self, incarnations: dict[str, str]) -> None:
        """The workers that are registered now and their incarnations; others are forgotten."""
        self._registered = incarnations
        self._latest = {
            worker_id: memory
            for worker_id, memory in self._latest.items()
            if incarnations.get(worker_id) == memory.incarnation
        }
        self._heard_s = {
            worker_id: heard_s
            for worker_id, heard_s in self._heard_s.items()
            if worker_id in self._latest
        }
        self._standings = {
            worker_id: standing
            for worker_id, standing in self._standings.items()
            if worker_id in self._latest
        }

    def report(self, memory: MemoryReport) -> None:
        """Take a report; one of a worker that is not registered under it is ignored.

        It reports again within a second of its registration.
        """
        if self._registered.get(memory.worker_id) == memory.incarnation:
            now_s = monotonic_s()
            self._latest[memory.worker_id] = memory
            self._heard_s[memory.worker_id] = now_s
            self._note_standing(memory, now_s)

    def fresh(self, now_s: float) -> dict[str, MemoryReport]:
        """The reports of workers that are not silent, by worker."""
        return {
            worker_id: memory
            for worker_id, memory in self._latest.items()
            if now_s - self._heard_s[worker_id] <= REPORT_FRESH_S
        }

    def engines(self, now_s: float) -> dict[str, EngineReport]:
        """What the engines of workers that are not silent report, by worker."""
        return {worker_id: memory.engine for worker_id, memory in self.fresh(now_s).items()}

    def epoch_of(self, worker_id: str) -> int:
        """Epoch of the configuration that a worker has reported to serve; 0 if none."""
        latest = self._latest.get(worker_id)
        return latest.engine.epoch if latest is not None else 0

    def standing_of(self, worker_id: str, epoch: int) -> Standing | None:
        """Since when a worker serves an epoch or a later one; None before that."""
        standing = self._standings.get(worker_id)
        return standing if standing is not None and standing.epoch >= epoch else None

    def _note_standing(self, memory: MemoryReport, now_s: float) -> None:
        standing, epoch = self._standings.get(memory.worker_id), memory.engine.epoch
        if standing is None or standing.epoch != epoch:
            standing = self._standings[memory.worker_id] = Standing(epoch, now_s)
        if standing.settled_s is None and not memory.engine.unsettled:
            standing.settled_s = now_s

    def workers(self) -> list[MemoryReport]:
        """Memory of the registered workers that have reported, ordered by id."""
        latest = self._latest
        return [latest[worker_id] for worker_id in sorted(latest)]
