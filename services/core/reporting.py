"""Timing and content of a worker's load and memory reports; called by worker and simulator.

A change that affects decisions of scheduler or memory manager is *major* and reported at once, but
not before a pause after the last report. The number of free KV blocks changes with every iteration:
unless blocks are scarce this is a *minor* change with a longer pause. Without changes, a report is
sent only as a heartbeat.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter

from services.core.prefix.cached_blocks import EVICTED_MAX
from services.core.report import Load, LoadReport, MemoryReport

RECEIVED_IDS_MAX = 10_000
"""Maximum number of request ids per report; later ids are not reported."""
TIGHT_SHARE = 0.25
"""Blocks are scarce below this share of free ones: any change may then affect a decision."""


class ReportUrgency(IntEnum):
    """Urgency of the changes since the last report; the higher, the earlier the next report."""

    NONE = 0
    MINOR = 1
    MAJOR = 2


@dataclass(slots=True)
class ReportSchedule:
    """Decides when the next report of a stream is due; the first is due at once.

    The interval between reports is at least `pause_s` (`minor_pause_s` if all changes are minor)
    and at most `heartbeat_s`.
    """

    pause_s: float
    heartbeat_s: float
    minor_pause_s: float = 0.0
    _urgency: ReportUrgency = ReportUrgency.NONE  # urgency of the changes since the last report
    _last_s: float = -math.inf  # time of the last report

    @property
    def due_s(self) -> float:
        """Time at which the next report is due, without further changes."""
        if self._urgency is ReportUrgency.NONE:
            return self.heartbeat_due_s
        minor = self._urgency is ReportUrgency.MINOR
        return self._last_s + (max(self.pause_s, self.minor_pause_s) if minor else self.pause_s)

    @property
    def heartbeat_due_s(self) -> float:
        """Time at which a report is due even without changes."""
        return self._last_s + self.heartbeat_s

    def note_change(self, urgency: ReportUrgency = ReportUrgency.MAJOR) -> bool:
        """Note a change of the reported state; returns whether `due_s` may have moved."""
        before, self._urgency = self._urgency, max(self._urgency, urgency)
        return self._urgency is not before

    def note_sent(self, now_s: float) -> None:
        """Note that a report was sent, or withheld because the engine is unresponsive."""
        self._urgency, self._last_s = ReportUrgency.NONE, now_s

    def note_unchanged(self) -> None:
        """Note that the state equals the last report again; only the heartbeat stays due."""
        self._urgency = ReportUrgency.NONE


@dataclass(slots=True)
class LoadReporting:
    """Creates a worker's load reports: a stream to the scheduler, and others sent via gateways.

    The scheduler ignores the load of a report that is older than the last one it read. Each report
    repeats the received requests and evicted prefixes of the stream's previous report, so that none
    is lost if a report via a gateway (*out of band*) arrives first. `LoadReport.dropped_total`
    shows which evictions are repeated: these prefixes may be cached again by then.
    """

    worker_id: str
    incarnation: str
    schedule: ReportSchedule
    _number: int = 0  # of the newest report
    _received: list[str] = field(default_factory=list)  # since the last report of the stream
    _reported: list[str] = field(default_factory=list)  # first listed in the last report
    _evicted: list[int] = field(default_factory=list)  # evicted since the last report
    _evicted_reported: list[int] = field(default_factory=list)  # first listed in the last report
    _evicted_total: int = 0  # evictions so far
    # Epoch and load of the last report of the stream; None if the next report must be sent at once:
    # before the first, after `force_next`, or if an out-of-band report differed.
    _last_sent: tuple[int, Load] | None = None

    def note_received(self, *request_ids: str) -> None:
        """Note the arrival of requests; ids beyond `RECEIVED_IDS_MAX` are not reported."""
        self._received += request_ids
        del self._received[RECEIVED_IDS_MAX:]

    def note_evicted(self, thin_hashes: Iterable[int]) -> None:
        """Note evictions from the prefix cache; only the newest `EVICTED_MAX` are reported."""
        have = len(self._evicted)
        self._evicted += thin_hashes
        self._evicted_total += len(self._evicted) - have
        del self._evicted[:-EVICTED_MAX]

    def create_out_of_band(self, epoch: int, load: Load) -> LoadReport:
        """Create an out-of-band report, numbered after all earlier reports."""
        self._number += 1
        if self._last_sent != (epoch, load):
            self._last_sent = None
        received = (*self._reported, *self._received)
        evicted = (*self._evicted_reported, *self._evicted)[-EVICTED_MAX:]
        return LoadReport(
            self.worker_id,
            self.incarnation,
            self._number,
            epoch,
            load,
            received,
            evicted,
            self._evicted_total,
        )

    def force_next(self) -> None:
        """Make the next report urgent: the scheduler may have restarted or may have no report."""
        self._last_sent = None

    def urgency(self, epoch: int, load: Load) -> ReportUrgency:
        """Urgency of the changes since the last report."""
        known = self._last_sent
        if self._received or known is None or known[0] != epoch:
            return ReportUrgency.MAJOR
        before = known[1]
        if _DISPATCH_FIELDS(before) != _DISPATCH_FIELDS(load):
            return ReportUrgency.MAJOR
        # The use of blocks changes with every iteration: report it at once only if blocks became
        # free, which may let a queued request start, or if they are scarce.
        if _BLOCK_FIELDS(before) != _BLOCK_FIELDS(load):
            more = load.kv_blocks_free > before.kv_blocks_free
            return ReportUrgency.MAJOR if more or _is_tight(load) else ReportUrgency.MINOR
        return ReportUrgency.MINOR if self._evicted else ReportUrgency.NONE

    def create_if_due(self, epoch: int, load: Load, now_s: float) -> LoadReport | None:
        """`create_next` if there is a change or a heartbeat is due; else None."""
        if self.urgency(epoch, load) or now_s >= self.schedule.heartbeat_due_s:
            return self.create_next(epoch, load, now_s)
        self.schedule.note_unchanged()
        return None

    def create_next(self, epoch: int, load: Load, now_s: float) -> LoadReport:
        """Create the next report of the stream, changed or not; it counts as sent."""
        report = self.create_out_of_band(epoch, load)
        self._last_sent = (epoch, load)
        self._reported, self._received = self._received, []
        self._evicted_reported, self._evicted = self._evicted, []
        self.schedule.note_sent(now_s)
        return report


def memory_report_urgency(before: MemoryReport | None, report: MemoryReport) -> ReportUrgency:
    """Urgency of a memory report after the report `before`, if any."""
    if before is None or _GROUP_CHANGE_FIELDS(before) != _GROUP_CHANGE_FIELDS(report):
        return ReportUrgency.MAJOR
    if before == report:
        return ReportUrgency.NONE
    engine = report.engine
    # The memory manager reacts to overload by the exact number of blocks once memory is short.
    urgent = engine.trouble or engine.load.waiting_demand > 0 or _is_tight(engine.load)
    return ReportUrgency.MAJOR if urgent else ReportUrgency.MINOR


def _is_tight(load: Load) -> bool:
    """Whether few blocks are free, counting those of batch sequences that would be preempted."""
    free = load.kv_blocks_free + load.kv_blocks_yielding
    return free < TIGHT_SHARE * load.kv_blocks_total


_BLOCK_FIELDS = attrgetter("kv_blocks_free", "kv_blocks_batch")
_DISPATCH_FIELDS = attrgetter(
    *("running", "waiting", "kv_blocks_wanted", "kv_blocks_total", "batch_running"),
    *("batch_waiting", "batch_yields", "prefill_tokens", "sequences_max"),
    *("prefix_queries_total", "prefix_hits_total", "adapter_use"),
)
"""Fields of a load by which the scheduler assigns requests, except the blocks in use."""
_GROUP_CHANGE_FIELDS = attrgetter(
    *("incarnation", "pids", "engine_hung", "engine.epoch", "engine.unsettled", "engine.outage"),
    *("engine.trouble", "engine.parameter_bytes", "engine.load.running", "engine.load.waiting"),
    *("engine.load.kv_blocks_wanted", "engine.load.kv_blocks_total"),
    *("engine.load.batch_running", "engine.load.batch_waiting", "engine.load.batch_yields"),
)
"""Fields by which the memory manager changes groups, except the blocks in use. The other fields are
counters, or change together with `trouble` (the reason why the group cannot continue)."""
