"""Measures the scheduler's rates of arrivals, dispatches and refusals, and derives Retry-After."""

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from services.core.service import ServiceClass

RETRY_AFTER_MIN_S = 1.0
RETRY_AFTER_MAX_S = 48.0
"""The gateway adds jitter of up to 25 %, which makes it a minute."""
RATE_WINDOW_S = 10.0
DISPATCHES_MIN = 20
"""Minimum number of dispatches from which `QueuePace` computes a rate."""


@dataclass(slots=True)
class DispatchRate:
    """Rate of recent dispatches, that is requests that left the queue for a group."""

    # Times of the latest dispatches.
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    def note(self, now_s: float) -> None:
        """Count a dispatch."""
        self._times_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Dispatches per second over the last 10 s, or over the last 1,024 if those were faster."""
        while self._times_s and self._times_s[0] < now_s - RATE_WINDOW_S:
            self._times_s.popleft()
        if len(self._times_s) == self._times_s.maxlen:
            return len(self._times_s) / max(now_s - self._times_s[0], 1e-3)
        return len(self._times_s) / RATE_WINDOW_S


@dataclass(slots=True)
class ClassRates:
    """Dispatch rates, overall and by class."""

    overall: DispatchRate = field(default_factory=DispatchRate)
    _of_class: dict[ServiceClass, DispatchRate] = field(
        default_factory=lambda: {cls: DispatchRate() for cls in ServiceClass}
    )

    def note(self, service_class: ServiceClass, now_s: float) -> None:
        """Count a dispatch."""
        self.overall.note(now_s)
        self._of_class[service_class].note(now_s)

    def per_s(self, classes: Collection[ServiceClass], now_s: float) -> float:
        """Dispatches per second of these classes together."""
        if len(classes) == len(self._of_class):
            return self.overall.per_s(now_s)
        return sum(self._of_class[cls].per_s(now_s) for cls in classes)


@dataclass(slots=True)
class QueuePace:
    """Dispatch rate of a queue while requests wait in it.

    Dispatches before the queue was last empty do not count: they were limited by arrivals, so
    they do not show how many requests the workers can start.
    """

    # When the queue was last empty.
    _since_s: float = math.inf
    _times_s: deque[float] = field(default_factory=lambda: deque(maxlen=1024))

    def begin(self, now_s: float) -> None:
        """Restart the measurement: a request joins the empty queue."""
        self._since_s = now_s
        self._times_s.clear()

    def note(self, now_s: float) -> None:
        """Count a dispatch from the queue."""
        self._since_s = min(self._since_s, now_s)
        self._times_s.append(now_s)

    def per_s(self, now_s: float, window_s: float) -> float | None:
        """Dispatches per second over `window_s` or the last `DISPATCHES_MIN`, whichever is longer.

        The period begins when the queue was last empty, at the earliest. None if there were fewer
        dispatches, or none in the period: then all running requests may just be long.
        """
        times_s = self._times_s
        if len(times_s) < DISPATCHES_MIN:
            return None
        first_s = min(now_s - window_s, times_s[-DISPATCHES_MIN])
        known_s = times_s[0] if len(times_s) == times_s.maxlen else self._since_s
        # A full deque has lost older dispatches: do not count the time before its first entry.
        first_s = max(first_s, known_s)
        starts = sum(time_s >= first_s for time_s in times_s)
        return starts / max(now_s - first_s, 1e-3) if starts else None


@dataclass(slots=True)
class RecentSum:
    """Requests and their KV tokens over the last `window_s`, in buckets of 1 s."""

    window_s: int
    # Requests and tokens by second, oldest first.
    _seconds: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, tokens: int, now_s: float, requests: int = 1) -> None:
        """Count a request that needs `tokens` of KV, or tokens of a request that is counted."""
        self._discard_old(now_s)
        count, total = self._seconds.get(int(now_s), (0, 0))
        self._seconds[int(now_s)] = count + requests, total + tokens

    def at(self, now_s: float) -> tuple[int, int]:
        """Requests and tokens in the window."""
        self._discard_old(now_s)
        counts = self._seconds.values()
        return sum(count[0] for count in counts), sum(count[1] for count in counts)

    def per_s(self, now_s: float) -> float:
        """Tokens per second over the window, including the unfinished second."""
        return self.at(now_s)[1] / (self.window_s - 1 + now_s % 1)

    def recent_per_s(self, now_s: float, least_s: float) -> float:
        """As `per_s`, but over the time since the first arrival in the window, at least `least_s`.

        So it is not too low while arrivals begin.
        """
        _, tokens = self.at(now_s)
        return tokens / max(least_s, now_s - next(iter(self._seconds), now_s))

    def _discard_old(self, now_s: float) -> None:
        oldest = int(now_s) - self.window_s
        while self._seconds and (first := next(iter(self._seconds))) <= oldest:
            del self._seconds[first]


def retry_after_s(queued: int, rate_per_s: float) -> float:
    """Seconds until `queued` requests have left the queue at `rate_per_s`, bounded."""
    if rate_per_s <= 0:
        return RETRY_AFTER_MAX_S
    return min(max(queued / rate_per_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
