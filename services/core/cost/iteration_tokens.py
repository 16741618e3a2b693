"""How many tokens the iterations of a worker run, as a cumulative histogram."""

from bisect import bisect_left
from dataclasses import dataclass, field

UPPER_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Largest number of tokens of each bucket but the last, which has no bound."""


@dataclass(frozen=True, slots=True)
class IterationTokens:
    """Iterations by their tokens: `counts` one for each bucket (empty: none ran), `tokens` all."""

    counts: tuple[int, ...] = ()
    tokens: int = 0


@dataclass(slots=True)
class IterationTokenMeter:
    """Counts the iterations that a leader plans; a later stage runs the same tokens again."""

    _counts: list[int] = field(default_factory=lambda: [0] * (len(UPPER_BOUNDS) + 1))
    _tokens: int = 0

    @property
    def total(self) -> IterationTokens:
        """The histogram of all iterations so far."""
        return IterationTokens(tuple(self._counts), self._tokens)

    def ran(self, tokens: int) -> None:
        """An iteration of so many tokens."""
        self._counts[bisect_left(UPPER_BOUNDS, tokens)] += 1
        self._tokens += tokens
