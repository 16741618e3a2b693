"""How much of the spare time of iterations batch work gets, and how long its own may take.

Filling up to a deadline makes online requests stay longer, so they hold more KV and more places.
Batch work therefore gets a part of the time between what online work costs and the deadline: less
at once when online requests suffer, and slowly more when they do not.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

FILL_MIN = 0.02
FILL_CUT = 0.9
FILL_RISE = 0.01
CROWDED = 0.6
"""Part of the blocks or of the places that online sequences hold, beyond which they are pressed."""
TARGET_KEPT_S = 120.0
"""Seconds for which a target of a first token is expected to be seen again."""
LONE_DECODES = 4
"""An iteration without online work may cost at least so many lone decodes: it has to advance."""


@dataclass(slots=True)
class FillLevel:
    """The part of the spare time that is filled: at most `most`, which is 0 to 1."""

    most: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.most

    def observe(self, pressed: bool) -> None:
        """An iteration with batch work beside online work is over; `pressed`: online work suffers.

        That is: a deadline was missed, an online request waits for blocks or a place, or online
        sequences are crowded.
        """
        if pressed:
            self.level = min(self.most, max(FILL_MIN, FILL_CUT * self.level))
        else:
            self.level = min(self.most, self.level + FILL_RISE)


@dataclass(slots=True)
class FirstTokenTargets:
    """The least target of a first token that was seen lately: arrivals find a running iteration."""

    _seen: deque[tuple[float, float]] = field(default_factory=deque)  # (when, target), rising

    def note(self, now_s: float, ttft_s: float) -> None:
        """An online request with this target has arrived."""
        while self._seen and self._seen[-1][1] >= ttft_s:
            self._seen.pop()
        self._seen.append((now_s, ttft_s))

    def offline_limit_s(self, now_s: float, most_s: float, lone_decode_s: float) -> float:
        """Seconds that an iteration without online work may take.

        Nobody interrupts it, so that is half of the least target, and `most_s` without one.
        """
        while self._seen and self._seen[0][0] < now_s - TARGET_KEPT_S:
            self._seen.popleft()
        least_s = self._seen[0][1] if self._seen else inf
        return max(LONE_DECODES * lone_decode_s, min(most_s, least_s / 2))
