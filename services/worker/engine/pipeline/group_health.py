"""Detects that a group cannot continue: a lost member, a late join, a microbatch that is stuck."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.core.changeover.state import DRAINED_TIMEOUT_S
from services.core.stall_limit import StallLimit


@dataclass(slots=True)
class GroupHealth:
    """An engine's view of its group's health, reported to the memory manager."""

    lost: tuple[str, ...] = ()  # lost members of the group
    _entered_s: float = 0.0  # start of the configuration
    _launched_s: deque[float] = field(default_factory=deque)  # launches in flight, oldest first
    _stall: StallLimit = field(default_factory=StallLimit)
    _alarm: str = ""  # the overdue condition that was reported and has not ended

    def enter(self, now_s: float) -> None:
        """Reset at the start of a configuration."""
        self.lost = ()
        self._entered_s = now_s
        self._launched_s.clear()
        self._alarm = ""

    def note_lost(self, worker_ids: Iterable[str]) -> None:
        """Set the members of the group that were lost in this configuration."""
        self.lost = tuple(sorted(worker_ids))

    def note_launched(self, now_s: float) -> None:
        """Record that this leader launched a microbatch."""
        self._launched_s.append(now_s)

    def note_returned(self, now_s: float) -> None:
        """Record that the oldest microbatch in flight returned."""
        if self._launched_s:
            self._stall.note_completed(now_s - self._launched_s.popleft())
            self._alarm = ""

    def trouble(self, now_s: float, joining: bool = False) -> str:
        """Return a human-readable reason why the group cannot continue; "" while it can.

        `joining`: this leader waits for stages to join. A new overdue condition raises the stall
        limit.
        """
        if self.lost:
            return f"the connection to {', '.join(self.lost)} is lost"
        if joining:
            # A stage joins after its previous leader has drained, which the drain timeout bounds.
            waited_s, limit_s = now_s - self._entered_s, DRAINED_TIMEOUT_S + self._stall.limit_s
            return self._update_alarm("not every stage has joined", waited_s, limit_s)
        if not self._launched_s:
            return ""
        waited_s, limit_s = now_s - self._launched_s[0], self._stall.limit_s
        return self._update_alarm("a microbatch has not returned", waited_s, limit_s)

    def _update_alarm(self, condition: str, waited_s: float, limit_s: float) -> str:
        """Return the condition and its duration once it exceeds `limit_s`, else ""."""
        # An alarm raises the stall limit, possibly above the present wait: keep the alarm until
        # the condition ends.
        if self._alarm != condition and waited_s > limit_s:
            self._alarm = condition
            self._stall.note_alarm()
        return f"{condition} for {waited_s:.0f} s" if self._alarm == condition else ""
