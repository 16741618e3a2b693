"""How fast requests leave this gateway, and so when one that was refused may come again."""

import itertools
from collections.abc import Callable

from services.common.clock import monotonic_s
from services.core.scheduler.rate import RATE_WINDOW_S, DispatchRate, retry_after_s


class Turnover:
    """Counts those that leave and those that are refused, lately.

    A refused client comes again. So refused clients wait, all together, until as many have left.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._left = DispatchRate()
        self._refused = DispatchRate()
        self._numbers = itertools.count()

    def leave(self) -> None:
        """One has made room."""
        self._left.note(self._now_s())

    def refuse(self) -> float:
        """Count one that has no room; in so many seconds it may, 1 to 60, not the same for all."""
        now_s = self._now_s()
        self._refused.note(now_s)
        ahead = max(1, round(self._refused.per_s(now_s) * RATE_WINDOW_S))
        return retry_after_s(str(next(self._numbers)), ahead, self._left.per_s(now_s))
