"""Histogram of the tokens per iteration of a worker, for its metrics."""

from bisect import bisect_left
from dataclasses import dataclass, field

UPPER_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Inclusive upper bounds of the buckets, in tokens; one more bucket has no bound."""


@dataclass(frozen=True, slots=True)
class IterationTokens:
    """Number of iterations per bucket (empty if none ran), and the sum of their tokens."""

    counts: tuple[int, ...] = ()
    tokens: int = 0


@dataclass(slots=True)
class IterationTokenMeter:
    """Counts iterations; only a leader counts them, since later stages run the same tokens."""

    _counts: list[int] = field(default_factory=lambda: [0] * (len(UPPER_BOUNDS) + 1))
    _tokens: int = 0

    @property
    def total(self) -> IterationTokens:
        """The histogram of all iterations so far."""
        return IterationTokens(tuple(self._counts), self._tokens)

    def add(self, tokens: int) -> None:
        """Count an iteration of `tokens` tokens."""
        self._counts[bisect_left(UPPER_BOUNDS, tokens)] += 1
        self._tokens += tokens
