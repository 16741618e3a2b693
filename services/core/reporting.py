"""When a worker reports and what it numbers; the worker and the simulator drive it.

A change that somebody decides by is reported at once, those soon after a report together in the
next one. What every iteration moves a little, the use of KV blocks, can wait longer. There is a
report now and then without any change. A report of what has been told already is left out.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter

from services.core.prefix.cached_blocks import DROPPED_MAX
from services.core.report import Load, LoadReport, MemoryReport

RECEIVED_IDS_MAX = 10_000
TIGHT_SHARE = 0.25
"""If less than this share of an engine's blocks is free, each change of it may decide something."""


class ReportNews(IntEnum):
    """What a report would tell; the higher one is told sooner."""

    NONE = 0
    MINOR = 1
    MAJOR = 2


@dataclass(slots=True)
class ReportRhythm:
    """When the next report of a stream is due; the first one is at once.

    Two reports are `pause_s` apart at least, `minor_pause_s` if there is minor news alone, and
    `heartbeat_s` at most.
    """

    pause_s: float
    heartbeat_s: float
    minor_pause_s: float = 0.0
    _news: ReportNews = ReportNews.NONE
    _last_s: float = -math.inf

    @property
    def due_s(self) -> float:
        """When the next report is due, if nothing changes until then."""
        if self._news is ReportNews.NONE:
            return self.heartbeat_due_s
        minor = self._news is ReportNews.MINOR
        return self._last_s + (max(self.pause_s, self.minor_pause_s) if minor else self.pause_s)

    @property
    def heartbeat_due_s(self) -> float:
        """When the next report would be due without a change."""
        return self._last_s + self.heartbeat_s

    def note_change(self, news: ReportNews = ReportNews.MAJOR) -> bool:
        """What is reported has changed; returns whether that alters when a report is due."""
        was, self._news = self._news, max(self._news, news)
        return self._news is not was

    def passed(self, now_s: float) -> None:
        """A report was sent, or left out since the reporter may not speak."""
        self._news, self._last_s = ReportNews.NONE, now_s

    def unchanged(self) -> None:
        """What is reported is as it was told; the next heartbeat is due when it was."""
        self._news = ReportNews.NONE


@dataclass(slots=True)
class LoadReporting:
    """A worker's load reports: those of its stream to the scheduler, and those told beside it.

    A report names the requests that were received since the last report of the stream or the one
    before: so one that overtakes that report makes up for it. So it is with dropped prefixes, which
    are numbered: one that is told twice may be cached again meanwhile.
    """

    worker_id: str
    incarnation: str
    rhythm: ReportRhythm
    _told: int = 0
    _received: list[str] = field(default_factory=list)
    _reported: list[str] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _dropped_reported: list[int] = field(default_factory=list)
    _dropped_total: int = 0
    # Epoch and load of the last report of the stream, unless others were told beside it since.
    _known: tuple[int, Load] | None = None

    def note_received(self, *request_ids: str) -> None:
        """These requests have arrived."""
        self._received += request_ids
        del self._received[RECEIVED_IDS_MAX:]

    def note_dropped(self, thin_hashes: Iterable[int]) -> None:
        """These are no longer in the prefix cache; of many, the newest are reported."""
        have = len(self._dropped)
        self._dropped += thin_hashes
        self._dropped_total += len(self._dropped) - have
        del self._dropped[:-DROPPED_MAX]

    def told_beside(self, epoch: int, load: Load) -> LoadReport:
        """A report beside the stream, with a higher number than any before."""
        self._told += 1
        if self._known != (epoch, load):
            self._known = None
        received = (*self._reported, *self._received)
        dropped = (*self._dropped_reported, *self._dropped)[-DROPPED_MAX:]
        return LoadReport(
            self.worker_id,
            self.incarnation,
            self._told,
            epoch,
            load,
            received,
            dropped,
            self._dropped_total,
        )

    def forget(self) -> None:
        """What was told does not count: the reader is another one, or may have forgotten it."""
        self._known = None

    def news(self, epoch: int, load: Load) -> ReportNews:
        """What a report of the stream would say that it has not said."""
        known = self._known
        if self._received or known is None or known[0] != epoch:
            return ReportNews.MAJOR
        before = known[1]
        if _DISPATCHED_BY(before) != _DISPATCHED_BY(load):
            return ReportNews.MAJOR
        if _BLOCKS(before) != _BLOCKS(load):
            more = load.kv_blocks_free > before.kv_blocks_free
            return ReportNews.MAJOR if more or _is_tight(load) else ReportNews.MINOR
        return ReportNews.MINOR if self._dropped else ReportNews.NONE

    def due(self, epoch: int, load: Load, now_s: float) -> LoadReport | None:
        """The next report of the stream, None if it would say nothing new and is no heartbeat."""
        if self.news(epoch, load) or now_s >= self.rhythm.heartbeat_due_s:
            return self.next(epoch, load, now_s)
        self.rhythm.unchanged()
        return None

    def next(self, epoch: int, load: Load, now_s: float) -> LoadReport:
        """The next report of the stream, whatever it says."""
        report = self.told_beside(epoch, load)
        self._known = (epoch, load)
        self._reported, self._received = self._received, []
        self._dropped_reported, self._dropped = self._dropped, []
        self.rhythm.passed(now_s)
        return report


def memory_news(told: MemoryReport | None, report: MemoryReport) -> ReportNews:
    """What a worker's report would tell the memory manager after that which it has `told`."""
    if told is None or _DECIDED_BY(told) != _DECIDED_BY(report):
        return ReportNews.MAJOR
    if told == report:
        return ReportNews.NONE
    engine = report.engine
    urgent = engine.trouble or engine.load.waiting_demand > 0 or _is_tight(engine.load)
    return ReportNews.MAJOR if urgent else ReportNews.MINOR


def _is_tight(load: Load) -> bool:
    free = load.kv_blocks_free + load.kv_blocks_yielding
    return free < TIGHT_SHARE * load.kv_blocks_total


_BLOCKS = attrgetter("kv_blocks_free", "kv_blocks_batch")
_DISPATCHED_BY = attrgetter(
    *("running", "waiting", "kv_blocks_wanted", "kv_blocks_total", "batch_running"),
    *("batch_waiting", "batch_yields", "prefill_tokens"),
    *("prefix_queries_total", "prefix_hits_total"),
)
"""What the scheduler is told of a load, but for the blocks in use."""
_DECIDED_BY = attrgetter(
    *("incarnation", "pids", "engine_hung", "engine.epoch", "engine.unsettled"),
    *("engine.trouble", "engine.parameter_bytes", "engine.load.running", "engine.load.waiting"),
    *("engine.load.kv_blocks_wanted", "engine.load.kv_blocks_total"),
    *("engine.load.batch_running", "engine.load.batch_waiting", "engine.load.batch_yields"),
)
"""What groups are changed by, but for the blocks in use. All else is sums, and what goes with
`trouble`."""
