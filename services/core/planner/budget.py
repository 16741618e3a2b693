"""Time budget of an iteration (`Budget`), and the predicted cost of its chunks so far (`Spent`).

The *residual time* of a decode is the time until the deadline of its next token. The
least residual time of the online decodes bounds an iteration (BROS §4.2). *Model seconds* are
seconds as predicted by the cost model. Measured iteration times correct them: by a scale per kind
of iteration, and by a safety margin that shrinks when an iteration takes longer than the residual
time. Both depend only on the planner's events, so a replay of the log reproduces them.
"""

from dataclasses import dataclass
from math import inf

from services.core.cost.model import CostModel

MARGIN_MIN, MARGIN_MAX = 0.7, 0.98
MARGIN_CUT = 0.95
"""Factor of the margin after an iteration that exceeded the residual time."""
MARGIN_RISE = 1.001
"""Factor of the margin after any other iteration."""
WEIGHT = 0.1
"""Weight of the newest iteration in an exponential moving average."""
RATIO_MIN, RATIO_MAX = 0.25, 4.0
"""Bounds of measured over predicted time, so that a pause of the process has little effect."""


@dataclass(slots=True)
class Budget:
    """Corrections of the cost model by measured times, and the mean iteration time.

    A *mixed* iteration has a chunk of more than one token; mixed and decode-only iterations have
    separate scales.
    """

    margin: float = MARGIN_MAX  # share of the least residual time that an iteration may use
    decode_scale: float = 1.0  # measured over predicted time, decode-only iterations
    mixed_scale: float = 1.0  # measured over predicted time, mixed iterations
    iteration_s: float = 0.0  # moving average of measured times; 0 before the first

    def limit_s(self, least_residual_s: float, mixed: bool) -> float:
        """Model seconds that an iteration may cost; `inf` without a deadline."""
        if least_residual_s == inf:
            return inf
        return self.margin * least_residual_s / self.scale(mixed)

    def scale(self, mixed: bool) -> float:
        """Moving average of measured over predicted time."""
        return self.mixed_scale if mixed else self.decode_scale

    def note_time(self, measured_s: float) -> None:
        """Update the mean iteration time; times ≤ 0 are ignored."""
        if measured_s > 0:
            weight = WEIGHT if self.iteration_s else 1.0
            self.iteration_s += weight * (measured_s - self.iteration_s)

    def observe(self, predicted_s: float, measured_s: float, allowed_s: float, mixed: bool) -> None:
        """Update all corrections after an iteration of `predicted_s` model seconds.

        `allowed_s` is the least residual time if the iteration was planned to end within it,
        else `inf`. Times ≤ 0 are ignored.
        """
        if measured_s <= 0 or predicted_s <= 0:
            return
        self.note_time(measured_s)
        ratio = min(max(measured_s / predicted_s, RATIO_MIN), RATIO_MAX)
        if mixed:
            self.mixed_scale += WEIGHT * (ratio - self.mixed_scale)
        else:
            self.decode_scale += WEIGHT * (ratio - self.decode_scale)
        # Overruns reduce the margin at once; it recovers slowly.
        if measured_s > allowed_s:
            self.margin = max(MARGIN_MIN, self.margin * MARGIN_CUT)
        else:
            self.margin = min(MARGIN_MAX, self.margin * MARGIN_RISE)


class Spent:
    """Model seconds and tokens of the chunks chosen for an iteration so far. Methods are O(1)."""

    def __init__(self, model: CostModel, tokens_max: int) -> None:
        self.tokens = 0
        self._model = model
        self._beyond_knee: CostModel | None = None  # created when a deadline first needs it
        self._tokens_max = tokens_max
        self._chunks_s = 0.0
        first_s = model.chunk_s(0, 1)
        # Marginal cost of a decode without prefix, and of each cached token before it.
        self._decode_s = first_s - model.lam
        self._decode_prefix_s = model.chunk_s(1, 1) - first_s

    @property
    def tokens_left(self) -> int:
        """Remaining token budget."""
        return self._tokens_max - self.tokens

    @property
    def seconds(self) -> float:
        """Cost of the iteration; 0 if empty."""
        if not self.tokens:
            return 0.0
        return self._model.lam + self._chunks_s + self._model.excess_s(self.tokens)

    def decodes_s(self, count: int, prefix_tokens: int) -> float:
        """Cost of an iteration of `count` decodes alone; 0 without decodes."""
        if not count:
            return 0.0
        shared_s = self._model.lam + self._model.excess_s(count)
        return shared_s + count * self._decode_s + prefix_tokens * self._decode_prefix_s

    def add_decodes(self, count: int, prefix_tokens: int) -> None:
        """Add decodes with `prefix_tokens` cached tokens in total."""
        self.tokens += count
        self._chunks_s += count * self._decode_s + prefix_tokens * self._decode_prefix_s

    def add(self, prefix: int, tokens: int) -> None:
        """Add a chunk."""
        self.tokens += tokens
        self._chunks_s += self._model.chunk_s(prefix, tokens) - self._model.lam

    def remove(self, prefix: int, tokens: int) -> None:
        """Remove a chunk that was added."""
        self.tokens -= tokens
        self._chunks_s -= self._model.chunk_s(prefix, tokens) - self._model.lam

    def with_chunk_s(self, prefix: int, tokens: int) -> float:
        """Cost of the iteration with this chunk added."""
        model = self._model
        chunks_s = self._chunks_s + model.chunk_s(prefix, tokens)
        return chunks_s + model.excess_s(self.tokens + tokens)

    def with_decodes_s(self, count: int, prefix_tokens: int) -> float:
        """Cost of the iteration with these decodes added."""
        chunks_s = self._chunks_s + count * self._decode_s + prefix_tokens * self._decode_prefix_s
        return self._model.lam + chunks_s + self._model.excess_s(self.tokens + count)

    def tokens_within(self, prefix: int, limit_s: float, most: int) -> int:
        """Largest chunk, up to `most` tokens, with which the iteration costs at most `limit_s`."""
        most = min(most, self.tokens_left)
        if limit_s == inf or most <= 0:
            return max(0, most)
        spent_s = self.seconds or self._model.lam
        self._beyond_knee = self._beyond_knee or self._model.beyond_knee
        tokens = self._beyond_knee.tokens_within(prefix, limit_s - spent_s, most)
        # `tokens_within` ignores that a chunk of one token may have its own coefficients.
        return tokens if tokens > 1 or self.with_chunk_s(prefix, 1) <= limit_s else 0
