"""How much of the spare time of iterations batch work gets, and how long its own may take.

Filling up to a deadline makes online requests stay longer, so they hold more KV and more places.
Batch work therefore gets a part of the time between what online work costs and the deadline: less
at once when online requests suffer, and slowly more when they do not.
"""

from collections import deque
from dataclasses import dataclass, field
from math import inf

SHARE_MIN = 0.02
SHARE_CUT = 0.9
SHARE_RISE = 0.01
CROWDED = 0.6
"""Part of the blocks or of the places that online sequences hold, beyond which they are pressed."""
TARGET_KEPT_S = 120.0
"""Seconds for which a target of a first token is expected to be seen again."""
GAP_WEIGHT = 0.1
"""The newest gap between online arrivals counts for so much of their mean."""
LONE_DECODES = 4
"""An iteration without online work may cost at least so many lone decodes: it has to advance."""


@dataclass(slots=True)
class HarvestShare:
    """The part of the spare time that is filled: at most `most`, which is 0 to 1."""

    most: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.most

    def observe(self, contended: bool) -> None:
        """An iteration with batch work beside online work is over; `contended`: online work suffers.

        That is: a deadline was missed, an online request waits for blocks or a place, or online
        sequences are crowded.
        """
        if contended:
            self.level = min(self.most, max(SHARE_MIN, SHARE_CUT * self.level))
        else:
            self.level = min(self.most, self.level + SHARE_RISE)


@dataclass(slots=True)
class OnlineArrivals:
    """What is known of online requests to come: they find a running iteration of batch work."""

    _targets: deque[tuple[float, float]] = field(default_factory=deque)  # (when, target), rising
    _last_s: float | None = None
    _gap_s: float = inf

    def note(self, now_s: float, ttft_s: float | None) -> None:
        """An online request has arrived, perhaps with a target for its first token."""
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            known = self._gap_s < inf
            self._gap_s = self._gap_s + GAP_WEIGHT * (gap_s - self._gap_s) if known else gap_s
        self._last_s = now_s
        self._forget(now_s)
        if ttft_s is not None:
            while self._targets and self._targets[-1][1] >= ttft_s:
                self._targets.pop()
            self._targets.append((now_s, ttft_s))

    def least_target_s(self, now_s: float) -> float:
        """The least target of a first token that was seen lately; `inf` without one."""
        self._forget(now_s)
        return self._targets[0][1] if self._targets else inf

    def _forget(self, now_s: float) -> None:
        """Drop the targets that were seen too long ago."""
        while self._targets and self._targets[0][0] < now_s - TARGET_KEPT_S:
            self._targets.popleft()

    def quiet_s(self, now_s: float) -> float:
        """Seconds without an online arrival that may be expected; `inf` after one at most."""
        if self._last_s is None or self._gap_s == inf:
            return inf
        return max(self._gap_s, now_s - self._last_s)


def offline_limit_s(lone_decode_s: float, most_s: float, waits_s: float) -> float:
    """Seconds that an iteration without online work may take.

    That is half of `waits_s`, by what an arrival or the iteration suffers, and at most `most_s`.
    """
    return max(LONE_DECODES * lone_decode_s, min(most_s, waits_s / 2))
