"""Histograms for metrics: counts by bucket, and the sum of the values."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inclusive upper bounds of the buckets for tokens per iteration."""
PREEMPTION_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Inclusive upper bounds of the buckets for the time until batch work yields, in seconds."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Number of values per bucket (empty without values), and the sum of the values.

    The last bucket has no upper bound.
    """

    counts: tuple[int, ...] = ()
    total: float = 0


@dataclass(slots=True)
class HistogramMeter:
    """Counts values in buckets with these inclusive `upper_bounds`, ascending."""

    upper_bounds: Sequence[float]
    _counts: list[int] = field(default_factory=list)  # empty before the first value
    _total: float = 0

    @property
    def histogram(self) -> Histogram:
        """The histogram of all values so far."""
        return Histogram(tuple(self._counts), self._total)

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts = self._counts or [0] * (len(self.upper_bounds) + 1)
        self._counts[bisect_left(self.upper_bounds, value)] += 1
        self._total += value
