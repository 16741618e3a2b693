"""How many lines the leader runs at once.

A line waits in the database rather than in the scheduler's queue, so that its order can still
change. A line that runs is *queued* while it has no assignment to a group, then *placed*.
"""

import math
from collections import deque
from dataclasses import dataclass, field

RATE_WINDOW_S = 5.0
QUEUED_MIN, QUEUED_MAX = 16, 256
PER_ASSIGNMENT = 2
"""Queued lines per assignment of the last `RATE_WINDOW_S`."""
CAUTION_S = 60.0
"""A refusal halves the queued lines for this time."""


@dataclass(slots=True)
class ClaimWindow:
    """Limits the claimed lines by the rate of assignments; refusals pause the claims.

    `window_max`: maximum number of lines that run. Times are those of a monotonic clock.
    """

    window_max: int
    # Times of the latest assignments: more than these do not change the limit.
    _placed_s: deque[float] = field(
        default_factory=lambda: deque(maxlen=QUEUED_MAX // PER_ASSIGNMENT)
    )
    _paused_until_s: float = -math.inf
    _careful_until_s: float = -math.inf
    _halvings: int = 0

    def note_placed(self, now_s: float) -> None:
        """Note that a line was assigned to a group."""
        self._placed_s.append(now_s)

    def note_refused(self, now_s: float, retry_after_s: float) -> None:
        """Note that the scheduler or the gateway refused a line for lack of room."""
        # Lines that were sent together are refused together: they count as one refusal.
        if now_s >= self._paused_until_s:
            careful = now_s < self._careful_until_s
            halvings = self._halvings + 1 if careful else 1
            self._halvings = min(halvings, QUEUED_MAX.bit_length())
        self._paused_until_s = max(self._paused_until_s, now_s + retry_after_s)
        self._careful_until_s = self._paused_until_s + CAUTION_S

    def queued_max(self, now_s: float) -> int:
        """Maximum number of queued lines, without regard to a pause."""
        recent = sum(at_s > now_s - RATE_WINDOW_S for at_s in self._placed_s)
        wanted = min(max(PER_ASSIGNMENT * recent, QUEUED_MIN), QUEUED_MAX)
        if now_s < self._careful_until_s:
            wanted >>= self._halvings
        return max(wanted, 1)

    def room(self, queued: int, placed: int, now_s: float) -> int:
        """Number of lines to claim now."""
        if now_s < self._paused_until_s:
            return 0
        return max(0, min(self.queued_max(now_s) - queued, self.window_max - queued - placed))

    def check_invariants(self) -> None:
        """The memory of assignments is bounded, and a pause makes careful."""
        assert len(self._placed_s) <= QUEUED_MAX // PER_ASSIGNMENT
        assert self._careful_until_s >= self._paused_until_s
