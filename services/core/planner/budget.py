"""How long an iteration may take, and the cost of what is in it so far.

The least residual time of a decode bounds an iteration (BROS §4.2). The cost model is never exact,
so its predictions are corrected by what iterations took: by a scale for each phase, and by a margin
that shrinks when an iteration overran. Both follow from the planner's events alone.
"""

from dataclasses import dataclass
from math import inf

from services.core.cost.model import CostModel

MARGIN_MIN, MARGIN_MAX = 0.7, 0.98
MARGIN_CUT = 0.95
"""After an iteration that overran; any other raises the margin by `MARGIN_RISE`."""
MARGIN_RISE = 1.001
WEIGHT = 0.1
"""The newest iteration counts for so much of a moving average."""
RATIO_MIN, RATIO_MAX = 0.25, 4.0
"""An iteration counts as no more than so far from its prediction: a pause is not the model's."""


@dataclass(slots=True)
class Budget:
    """Corrections of the cost model, and `iteration_s`, the mean of what iterations took.

    A *mixed* iteration has a chunk of more than one token; the two kinds are corrected apart.
    """

    margin: float = MARGIN_MAX
    decode_scale: float = 1.0
    mixed_scale: float = 1.0
    iteration_s: float = 0.0

    def limit_s(self, least_slack_s: float, mixed: bool) -> float:
        """Model seconds that an iteration may cost; `inf` if nothing is due."""
        if least_slack_s == inf:
            return inf
        return self.margin * least_slack_s / self.scale(mixed)

    def scale(self, mixed: bool) -> float:
        """By how much an iteration takes longer than the model says."""
        return self.mixed_scale if mixed else self.decode_scale

    def note_time(self, measured_s: float) -> None:
        """An iteration took so long; a time that is not above 0 says nothing."""
        if measured_s > 0:
            weight = WEIGHT if self.iteration_s else 1.0
            self.iteration_s += weight * (measured_s - self.iteration_s)

    def observe(self, predicted_s: float, measured_s: float, allowed_s: float, mixed: bool) -> None:
        """An iteration of `predicted_s` model seconds is over.

        `allowed_s` is the residual time that it was planned to keep, `inf` without one. A time that
        is not above 0 says nothing.
        """
        if measured_s <= 0 or predicted_s <= 0:
            return
        self.note_time(measured_s)
        ratio = min(max(measured_s / predicted_s, RATIO_MIN), RATIO_MAX)
        if mixed:
            self.mixed_scale += WEIGHT * (ratio - self.mixed_scale)
        else:
            self.decode_scale += WEIGHT * (ratio - self.decode_scale)
        if measured_s > allowed_s:
            self.margin = max(MARGIN_MIN, self.margin * MARGIN_CUT)
        else:
            self.margin = min(MARGIN_MAX, self.margin * MARGIN_RISE)


class Spent:
    """What the chunks chosen so far cost, in model seconds, and how many tokens they have. O(1)."""

    def __init__(self, model: CostModel, tokens_max: int) -> None:
        self.tokens = 0
        self._model = model
        self._further = model.beyond_knee
        self._tokens_max = tokens_max
        self._chunks_s = 0.0
        first_s = model.chunk_s(0, 1)
        self._decode_s = first_s - model.lam
        self._decode_prefix_s = model.chunk_s(1, 1) - first_s

    @property
    def tokens_left(self) -> int:
        """Tokens that the batch still has room for."""
        return self._tokens_max - self.tokens

    @property
    def seconds(self) -> float:
        """Cost of the iteration; 0 while it is empty."""
        if not self.tokens:
            return 0.0
        return self._model.lam + self._chunks_s + self._model.excess_s(self.tokens)

    def decodes_s(self, count: int, prefix_tokens: int) -> float:
        """Cost of an iteration of these decodes alone; 0 without any."""
        if not count:
            return 0.0
        shared_s = self._model.lam + self._model.excess_s(count)
        return shared_s + count * self._decode_s + prefix_tokens * self._decode_prefix_s

    def add_decodes(self, count: int, prefix_tokens: int) -> None:
        """Take these decodes in."""
        self.tokens += count
        self._chunks_s += count * self._decode_s + prefix_tokens * self._decode_prefix_s

    def add(self, prefix: int, tokens: int) -> None:
        """Take a chunk in."""
        self.tokens += tokens
        self._chunks_s += self._model.chunk_s(prefix, tokens) - self._model.lam

    def drop(self, prefix: int, tokens: int) -> None:
        """Leave a chunk out that was taken in."""
        self.tokens -= tokens
        self._chunks_s -= self._model.chunk_s(prefix, tokens) - self._model.lam

    def with_chunk_s(self, prefix: int, tokens: int) -> float:
        """Cost of the iteration if this chunk joins it."""
        model = self._model
        chunks_s = self._chunks_s + model.chunk_s(prefix, tokens)
        return chunks_s + model.excess_s(self.tokens + tokens)

    def with_decodes_s(self, count: int, prefix_tokens: int) -> float:
        """Cost of the iteration if these decodes join it."""
        chunks_s = self._chunks_s + count * self._decode_s + prefix_tokens * self._decode_prefix_s
        return self._model.lam + chunks_s + self._model.excess_s(self.tokens + count)

    def tokens_within(self, prefix: int, limit_s: float, most: int) -> int:
        """How many tokens of a chunk, up to `most`, join the iteration within `limit_s`."""
        most = min(most, self.tokens_left)
        if limit_s == inf or most <= 0:
            return max(0, most)
        spent_s = self.seconds or self._model.lam
        found = self._further.tokens_within(prefix, limit_s - spent_s, most)
        # A chunk of one token may have coefficients of its own.
        return found if found > 1 or self.with_chunk_s(prefix, 1) <= limit_s else 0
