"""How fast requests leave this gateway, and when a refused request may come again."""

import itertools
from collections.abc import Callable

from services.common.clock import monotonic_s
from services.core.scheduler.rate import RATE_WINDOW_S, DispatchRate, retry_after_s


class Turnover:
    """Counts the requests that left and the requests that were refused lately.

    Refused clients come again, so they are told to wait until as many requests have left.
    """

    def __init__(self, now_s: Callable[[], float] = monotonic_s) -> None:
        self._now_s = now_s
        self._left = DispatchRate()
        self._refused = DispatchRate()
        self._numbers = itertools.count()

    def leave(self) -> None:
        """A request has left."""
        self._left.note(self._now_s())

    def refuse(self) -> float:
        """Count a refused request; returns the seconds until a retry: 1 to 60, with jitter."""
        now_s = self._now_s()
        self._refused.note(now_s)
        ahead = max(1, round(self._refused.per_s(now_s) * RATE_WINDOW_S))
        return retry_after_s(str(next(self._numbers)), ahead, self._left.per_s(now_s))
