"""Whether a group can go on: its members are connected, its microbatches come back."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

STALLED_S = 5.0
"""A microbatch that has been in flight for less is only slow."""
STALLED_FACTOR = 10.0
"""How much longer it may take than the slowest one lately."""
SLOWEST_KEPT = 0.99
"""What is left of the slowest time with each one that comes back: a fault that held one up, and
passed by itself, counts for some hundreds of them."""


@dataclass(slots=True)
class GroupHealth:
    """One engine's view of its group, for the memory manager.

    A microbatch that was called stalled and was only slow is not so again: the limit doubles with
    each alarm until one comes back.
    """

    lost: tuple[str, ...] = ()
    _launched_s: deque[float] = field(default_factory=deque)  # of those in flight, oldest first
    _slowest_s: float = 0.0
    _alarms: int = 0
    _alarmed: bool = False  # by a microbatch that is still in flight

    def enter(self) -> None:
        """A configuration begins: nothing is in flight."""
        self.lost = ()
        self._launched_s.clear()
        self._alarmed = False

    def note_lost(self, worker_ids: Iterable[str]) -> None:
        """Members of the group to which the connection was lost in this configuration."""
        self.lost = tuple(sorted(worker_ids))

    def launched(self, now_s: float) -> None:
        """This leader has launched a microbatch."""
        self._launched_s.append(now_s)

    def finished(self, now_s: float) -> None:
        """The oldest one has come back."""
        if self._launched_s:
            took_s = now_s - self._launched_s.popleft()
            self._slowest_s = max(SLOWEST_KEPT * self._slowest_s, took_s)
            self._alarms, self._alarmed = 0, False

    def trouble(self, now_s: float) -> str:
        """Why the group cannot go on, for people; "" if it can, as far as is known here."""
        if self.lost:
            return f"the connection to {', '.join(self.lost)} is lost"
        if not self._launched_s:
            return ""
        limit_s = max(STALLED_S, STALLED_FACTOR * self._slowest_s) * 2**self._alarms
        waited_s = now_s - self._launched_s[0]
        if not self._alarmed and waited_s > limit_s:
            self._alarmed = True
            self._alarms = min(self._alarms + 1, 10)
        if not self._alarmed:
            return ""
        return f"a microbatch has not come back for {waited_s:.0f} s"
