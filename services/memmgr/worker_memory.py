"""The latest memory report of every registered worker."""

import asyncio
from dataclasses import dataclass

from services.common.clock import monotonic_s
from services.core.report import EngineReport, MemoryReport
from services.core.reporting import ReportNews, memory_news

REPORT_FRESH_S = 3.0
"""A worker that has not reported for so long may be frozen; it reports once a second at least."""


@dataclass(frozen=True, slots=True)
class LatestReport:
    """A worker's latest report, which came at `received_s`.

    The worker serves the epoch of that report since `served_s`; the change-over to it is over for
    the worker since `settled_s`, or not yet.
    """

    report: MemoryReport
    received_s: float
    served_s: float
    settled_s: float | None

    @property
    def epoch(self) -> int:
        """Epoch of the configuration that the worker serves."""
        return self.report.engine.epoch


class MemoryView:
    """Keeps one report per registered worker, so it is bounded by their number."""

    def __init__(self, news: asyncio.Event) -> None:
        """`news` is set by reports that may decide something, and when workers come or go."""
        self._news = news
        self._registered: dict[str, str] = {}
        self._heard: dict[str, LatestReport] = {}

    def set_registered(self, incarnations: dict[str, str]) -> None:
        """The workers that are registered now and their incarnations; others are forgotten."""
        self._registered = incarnations
        self._news.set()
        self._heard = {
            worker_id: latest
            for worker_id, latest in self._heard.items()
            if incarnations.get(worker_id) == latest.report.incarnation
        }

    def report(self, report: MemoryReport) -> None:
        """Take a report; one of a worker that is not registered under it is ignored.

        It reports again within a second of its registration.
        """
        if self._registered.get(report.worker_id) != report.incarnation:
            return
        now_s = monotonic_s()
        served_s, settled_s = now_s, None
        before = self._heard.get(report.worker_id)
        if before is not None and before.epoch == report.engine.epoch:
            served_s, settled_s = before.served_s, before.settled_s
        if settled_s is None and not report.engine.unsettled:
            settled_s = now_s
        self._heard[report.worker_id] = LatestReport(report, now_s, served_s, settled_s)
        told = before.report if before is not None else None
        if memory_news(told, report) is ReportNews.MAJOR:
            self._news.set()

    def fresh(self, now_s: float) -> dict[str, MemoryReport]:
        """The reports of workers that are not silent, by worker."""
        return {
            worker_id: latest.report
            for worker_id, latest in self._heard.items()
            if now_s - latest.received_s <= REPORT_FRESH_S
        }

    def engines(self, now_s: float) -> dict[str, EngineReport]:
        """What the engines of workers that are not silent report, by worker."""
        return {worker_id: report.engine for worker_id, report in self.fresh(now_s).items()}

    def latest(self, worker_id: str, epoch: int = 0) -> LatestReport | None:
        """What a worker last reported; None before it has, and before it serves `epoch`."""
        latest = self._heard.get(worker_id)
        return latest if latest is not None and latest.epoch >= epoch else None

    def workers(self) -> list[MemoryReport]:
        """Memory of the registered workers that have reported, ordered by id."""
        return [self._heard[worker_id].report for worker_id in sorted(self._heard)]
