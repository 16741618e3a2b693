"""When a worker reports and what it numbers; the worker and the simulator drive it.

A change is reported at once, those soon after a report together in the next one, and there is a
report now and then without any change. Of many running requests one takes a block in nearly every
iteration, and who reads the reports keeps blocks for that. So a load that only has less room than
the last one reported can wait, or reports would be as frequent as iterations.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.prefix.dropped_prefixes import DROPPED_MAX
from services.core.report import Load, LoadReport

RECEIVED_IDS_MAX = 10_000


@dataclass(slots=True)
class ReportRhythm:
    """When the next report of a stream is due; the first one is at once.

    Two reports are `pause_s` apart at least, and `heartbeat_s` at most. A change that can wait is
    reported `patience_s` after the last report.
    """

    pause_s: float
    heartbeat_s: float
    patience_s: float = 0.0
    _wait_s: float = math.inf  # from the last report on, for what has changed since
    _last_s: float = -math.inf

    @property
    def due_s(self) -> float:
        """When the next report is due, if nothing changes until then."""
        return self._last_s + min(self._wait_s, self.heartbeat_s)

    @property
    def heartbeat_due_s(self) -> float:
        """When the next report would be due without a change."""
        return self._last_s + self.heartbeat_s

    def note_change(self, can_wait: bool = False) -> bool:
        """What is reported has changed; returns whether that alters when a report is due."""
        was_s = self._wait_s
        self._wait_s = min(was_s, max(self.pause_s, self.patience_s) if can_wait else self.pause_s)
        return self._wait_s < was_s

    def passed(self, now_s: float) -> None:
        """A report was sent, or left out since there was nothing to say."""
        self._wait_s, self._last_s = math.inf, now_s


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
    _last: tuple[int, Load] | None = None  # epoch and load in the last report of the stream
    _received: list[str] = field(default_factory=list)
    _reported: list[str] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _dropped_reported: list[int] = field(default_factory=list)
    _dropped_total: int = 0

    def note_received(self, *request_ids: str) -> None:
        """These requests have arrived."""
        self._received += request_ids
        del self._received[RECEIVED_IDS_MAX:]

    def note_load(self, epoch: int, load: Load) -> bool:
        """The load has changed; returns whether that alters when a report is due."""
        last = self._last
        can_wait = (
            last is not None and not self._received and _has_only_less_room(last, epoch, load)
        )
        return self.rhythm.note_change(can_wait)

    def note_dropped(self, thin_hashes: Iterable[int]) -> None:
        """These are no longer in the prefix cache; of many, the newest are reported."""
        have = len(self._dropped)
        self._dropped += thin_hashes
        self._dropped_total += len(self._dropped) - have
        del self._dropped[:-DROPPED_MAX]

    def told_beside(self, epoch: int, load: Load) -> LoadReport:
        """A report beside the stream, with a higher number than any before."""
        self._told += 1
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

    def next(self, epoch: int, load: Load, now_s: float) -> LoadReport:
        """The next report of the stream."""
        report = self.told_beside(epoch, load)
        self._last = epoch, load
        self._reported, self._received = self._received, []
        self._dropped_reported, self._dropped = self._dropped, []
        self.rhythm.passed(now_s)
        return report


def _has_only_less_room(last: tuple[int, Load], epoch: int, load: Load) -> bool:
    """Whether the same sequences run and wait as in the last report, and no room was gained."""
    before = last[1]
    room = load.kv_blocks_free - load.kv_blocks_wanted
    return (epoch, load.running, load.waiting, load.kv_blocks_total) == (
        last[0],
        before.running,
        before.waiting,
        before.kv_blocks_total,
    ) and room <= before.kv_blocks_free - before.kv_blocks_wanted
