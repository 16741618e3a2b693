"""When a worker reports and what it numbers; the worker and the simulator drive it.

A change is reported at once, those soon after a report together in the next one, and there is a
report now and then without any change. A report of what has been told already is left out.
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

    Two reports are `pause_s` apart at least, and `heartbeat_s` at most.
    """

    pause_s: float
    heartbeat_s: float
    _changed: bool = False
    _last_s: float = -math.inf

    @property
    def due_s(self) -> float:
        """When the next report is due, if nothing changes until then."""
        return self._last_s + self.pause_s if self._changed else self.heartbeat_due_s

    @property
    def heartbeat_due_s(self) -> float:
        """When the next report would be due without a change."""
        return self._last_s + self.heartbeat_s

    def note_change(self) -> bool:
        """What is reported has changed; returns whether that alters when a report is due."""
        was, self._changed = self._changed, True
        return not was

    def passed(self, now_s: float) -> None:
        """A report was sent, or left out since the reporter may not speak."""
        self._changed, self._last_s = False, now_s

    def unchanged(self) -> None:
        """What is reported is as it was told; the next heartbeat is due when it was."""
        self._changed = False


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

    def has_news(self, epoch: int, load: Load) -> bool:
        """Whether a report of the stream would say what it has not said."""
        return bool(self._received or self._dropped) or self._known != (epoch, load)

    def due(self, epoch: int, load: Load, now_s: float) -> LoadReport | None:
        """The next report of the stream, None if it would say nothing new and is no heartbeat."""
        if self.has_news(epoch, load) or now_s >= self.rhythm.heartbeat_due_s:
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
