"""Keeps the latest memory report of every registered worker."""

import asyncio
from dataclasses import dataclass

from services.common.clock import monotonic_s
from services.core.report import EngineReport, MemoryReport
from services.core.reporting import ReportUrgency, memory_report_urgency

REPORT_FRESH_S = 3.0
"""A worker without a report for this long is silent and may hang; workers report every second."""


@dataclass(frozen=True, slots=True)
class LatestReport:
    """A worker's latest report; times on the monotonic clock."""

    report: MemoryReport
    received_s: float
    served_s: float  # first report of this epoch (the number of the worker's configuration)
    settled_s: float | None  # first report that all sequences and KV have moved; None: not yet

    @property
    def epoch(self) -> int:
        """Epoch of the configuration that the worker serves."""
        return self.report.engine.epoch


class MemoryView:
    """Keeps the latest report of each registered worker, which bounds its size."""

    def __init__(self, updated: asyncio.Event) -> None:
        """`updated` is set by reports that may cause a decision, and by changes of membership."""
        self._updated = updated
        self._registered: dict[str, str] = {}  # incarnations by worker id
        self._latest: dict[str, LatestReport] = {}  # by worker id

    def set_registered(self, incarnations: dict[str, str]) -> None:
        """Set the registered workers and their incarnations; reports of others are removed."""
        self._registered = incarnations
        self._updated.set()
        self._latest = {
            worker_id: latest
            for worker_id, latest in self._latest.items()
            if incarnations.get(worker_id) == latest.report.incarnation
        }

    def report(self, report: MemoryReport) -> None:
        """Record a report; reports of unregistered workers or incarnations are ignored."""
        # The worker reports again within a second of its registration.
        if self._registered.get(report.worker_id) != report.incarnation:
            return
        now_s = monotonic_s()
        served_s, settled_s = now_s, None
        before = self._latest.get(report.worker_id)
        if before is not None and before.epoch == report.engine.epoch:
            served_s, settled_s = before.served_s, before.settled_s
        if settled_s is None and not report.engine.unsettled:
            settled_s = now_s
        self._latest[report.worker_id] = LatestReport(report, now_s, served_s, settled_s)
        last = before.report if before is not None else None
        if memory_report_urgency(last, report) is ReportUrgency.MAJOR:
            self._updated.set()

    def fresh(self, now_s: float) -> dict[str, MemoryReport]:
        """The reports of workers that are not silent, by worker id."""
        return {
            worker_id: latest.report
            for worker_id, latest in self._latest.items()
            if now_s - latest.received_s <= REPORT_FRESH_S
        }

    def engines(self, now_s: float) -> dict[str, EngineReport]:
        """The engine reports of workers that are not silent, by worker id."""
        return {worker_id: report.engine for worker_id, report in self.fresh(now_s).items()}

    def latest(self, worker_id: str, epoch: int = 0) -> LatestReport | None:
        """A worker's latest report; None before the first report at `epoch` or later."""
        latest = self._latest.get(worker_id)
        return latest if latest is not None and latest.epoch >= epoch else None

    def workers(self) -> list[MemoryReport]:
        """The latest reports of the registered workers, ordered by worker id."""
        return [self._latest[worker_id].report for worker_id in sorted(self._latest)]
