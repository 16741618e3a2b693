"""How far predicted cache hits can be believed: the hits that workers report correct them."""

from dataclasses import dataclass, field

REMEMBERED = 32
"""Requests after which the rates so far count half."""
LEEWAY = 0.05
"""Added to both hit rates, so that small differences change little."""
SILENT_MAX = 64
"""Predicted hits after which a worker that reports no lookups is taken to have no prefix cache."""


@dataclass(slots=True)
class _Rate:
    """Cache hits per prompt token; newer requests count more."""

    tokens: float = 0.0
    hits: float = 0.0

    def add(self, tokens: int, hits: float) -> None:
        self.tokens += tokens
        self.hits += hits

    def halve(self) -> None:
        self.tokens /= 2
        self.hits /= 2

    @property
    def value(self) -> float:
        return self.hits / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class HitTrust:
    """Compares two hit rates of one group: as predicted, and as its worker reports.

    Rates instead of sums, since a worker looks prompts up some time after they were sent.
    """

    _predicted: _Rate = field(default_factory=_Rate)
    _told: _Rate = field(default_factory=_Rate)
    _totals: tuple[int, int] | None = None  # as the worker reported last
    _sent: int = 0
    _silent: int = 0  # predicted hits that were sent since the worker looked anything up

    @property
    def factor(self) -> float:
        """By how much to multiply a predicted hit, 0 to 1."""
        if self._silent >= SILENT_MAX:
            return 0.0
        if not self._told.tokens:
            return 1.0
        return min(1.0, (self._told.value + LEEWAY) / (self._predicted.value + LEEWAY))

    def note_sent(self, prompt_tokens: int, hit_tokens: int) -> None:
        """A prompt was sent there; the index has predicted these hits, before any correction."""
        self._predicted.add(prompt_tokens, hit_tokens)
        self._silent += hit_tokens > 0
        self._sent += 1
        if self._sent == REMEMBERED:
            self._sent = 0
            self._predicted.halve()
            self._told.halve()

    def note_told(self, queries_total: int, hits_total: int) -> None:
        """The worker has looked up so many prompt tokens since it started, so many were hits.

        The first totals are a base: they were before the requests that count here.
        """
        queries_before, hits_before = self._totals or (queries_total, hits_total)
        self._totals = queries_total, hits_total
        if queries_total > queries_before:
            self._silent = 0
            self._told.add(queries_total - queries_before, hits_total - hits_before)
