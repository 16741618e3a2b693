"""Whether a group can go on: its members are connected and join, its microbatches come back."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.changeover.state import DRAINED_TIMEOUT_S
from services.core.stall import StallLimit


@dataclass(slots=True)
class GroupHealth:
    """One engine's view of its group, for the memory manager."""

    lost: tuple[str, ...] = ()
    _entered_s: float = 0.0
    _launched_s: deque[float] = field(default_factory=deque)  # of those in flight, oldest first
    _stall: StallLimit = field(default_factory=StallLimit)
    _alarm: str = ""  # what has been waited for too long, and still is

    def enter(self, now_s: float) -> None:
        """A configuration begins: nothing is in flight."""
        self.lost = ()
        self._entered_s = now_s
        self._launched_s.clear()
        self._alarm = ""

    def note_lost(self, worker_ids: Iterable[str]) -> None:
        """Members of the group to which the connection was lost in this configuration."""
        self.lost = tuple(sorted(worker_ids))

    def launched(self, now_s: float) -> None:
        """This leader has launched a microbatch."""
        self._launched_s.append(now_s)

    def finished(self, now_s: float) -> None:
        """The oldest one has come back."""
        if self._launched_s:
            self._stall.came(now_s - self._launched_s.popleft())
            self._alarm = ""

    def trouble(self, now_s: float, joining: bool = False) -> str:
        """Why the group cannot go on, for people; "" if it can, as far as is known here.

        `joining`: this leader waits for stages to join.
        """
        if self.lost:
            return f"the connection to {', '.join(self.lost)} is lost"
        if joining:
            # Its stages may wait for their last leader themselves.
            waited_s, limit_s = now_s - self._entered_s, DRAINED_TIMEOUT_S + self._stall.limit_s
            return self._overdue("not every stage has joined", waited_s, limit_s)
        if not self._launched_s:
            return ""
        waited_s, limit_s = now_s - self._launched_s[0], self._stall.limit_s
        return self._overdue("a microbatch has not come back", waited_s, limit_s)

    def _overdue(self, what: str, waited_s: float, limit_s: float) -> str:
        """A sentence, once it has been waited for too long."""
        if self._alarm != what and waited_s > limit_s:
            self._alarm = what
            self._stall.alarmed()
        return f"{what} for {waited_s:.0f} s" if self._alarm == what else ""
