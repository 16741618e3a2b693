"""How many requests for a model arrived, and how many were refused, in the last seconds."""

from dataclasses import dataclass, field

from services.core.scheduler.rate import ClassRates, LinePace

ARRIVALS_S = 3
REFUSALS_S = 10


@dataclass(slots=True)
class RecentSum:
    """Sums of requests and their KV tokens, second by second, over the last `window_s`."""

    window_s: int
    _seconds: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, tokens: int, now_s: float) -> None:
        """Count one request."""
        self._drop_old(now_s)
        requests, total = self._seconds.get(int(now_s), (0, 0))
        self._seconds[int(now_s)] = requests + 1, total + tokens

    def at(self, now_s: float) -> tuple[int, int]:
        """Requests and tokens."""
        self._drop_old(now_s)
        counts = self._seconds.values()
        return sum(count[0] for count in counts), sum(count[1] for count in counts)

    def _drop_old(self, now_s: float) -> None:
        oldest = int(now_s) - self.window_s
        while self._seconds and (first := next(iter(self._seconds))) <= oldest:
            del self._seconds[first]


@dataclass(slots=True)
class DemandMeter:
    """Arrivals at, departures from and refusals by the scheduler, of one model."""

    arrived: RecentSum = field(default_factory=lambda: RecentSum(ARRIVALS_S))
    refused: RecentSum = field(default_factory=lambda: RecentSum(REFUSALS_S))
    dispatched: ClassRates = field(default_factory=ClassRates)
    pace: LinePace = field(default_factory=LinePace)

    def arrived_tokens_per_s(self, now_s: float) -> float:
        """KV tokens a second; of the running second, only what has passed counts."""
        return self.arrived.at(now_s)[1] / (ARRIVALS_S - 1 + now_s % 1)
