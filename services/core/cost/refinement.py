"""Refits a cost model to the iterations that a worker runs under load.

Weighted least squares of the relative error, kept as normal equations of fixed size: an iteration
adds to them in constant time and memory, and older iterations fade. A refit solves them for
coefficients ≥ 0, together with the base model's own predictions of a few batches, which determine
what the load leaves open: iterations of decodes alone say nothing about long prompts. When recent
iterations take far more or less time than predicted, the device has changed, and older ones fade at
once.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from services.core.cost.least_squares import solve_normal
from services.core.cost.model import Chunks, CostModel, model_apart, row_apart

FADING = 1 + 1 / 512
"""Weight of an iteration relative to the one before it: some 512 iterations count."""
ERROR_BOUND = 0.1
"""An iteration with a larger relative error counts less, so that its pull on the fit is bounded: a
pause of the process moves the fit no more than an error of this size (Huber's weights)."""
SPEEDUP_MAX = 4.0
"""An iteration counts as at most this much faster than predicted: relative errors of much shorter
times have no other bound."""
FIRST_REFIT, LAST_REFIT = 32, 512
"""Iterations until the first refit; the interval doubles up to the second number."""
RECENT = FIRST_REFIT
"""Iterations whose median ratio of measured to predicted time shows a change of the device."""
CHANGED_MIN = 1.3
"""Median ratio, or its inverse, from which on the device has changed."""
CHANGED_FADING = 0.1
"""Weight that older iterations keep when the device has changed."""
CHANGE_MIN = 0.03
"""Relative change of a predicted time below which a refit keeps the present model."""
PRIOR_BATCHES: Sequence[Chunks] = (
    *(((16, 1),) * decodes for decodes in (1, 8, 32)),
    *(((512, 1),) * decodes for decodes in (1, 8, 32)),
    *(((prefix, new),) for prefix in (0, 512) for new in (16, 64, 256)),
    # Without it, the cost of long prompts would be extrapolated from short ones, and equal workers
    # would differ by a factor.
    ((2048, 256),),
    ((0, 32),) * 4,
    (*((128, 1),) * 8, (0, 64)),
)
"""Batches whose times, as the base model predicts them, are part of each refit."""
PRIOR_WEIGHT = 0.1
"""Weight of each of them, in iterations as long as the present model predicts them."""

SIZE = len(row_apart((), None))


@dataclass(slots=True)
class CostRefiner:
    """Learns from iterations (`add`) and corrects `model` (`refit`)."""

    model: CostModel
    _prior: list[tuple[Chunks, tuple[float, ...], float]] = field(init=False)
    # Sums over iterations of weight · rowᵀ·row (lower triangle) and weight · row; each row is
    # divided by the measured time, so that the target is 1.
    _matrix: list[list[float]] = field(init=False)
    _target: list[float] = field(init=False)
    _weight: float = 1.0  # of the next iteration; grows instead of fading all sums
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _until_refit: int = FIRST_REFIT
    _interval: int = FIRST_REFIT

    def __post_init__(self) -> None:
        self.restart(self.model)

    def restart(self, base: CostModel) -> None:
        """Begin again from another base model."""
        self.model = base
        knee = base.knee or None
        timed = ((batch, base.batch_s(batch)) for batch in PRIOR_BATCHES)
        self._prior = [(batch, row_apart(batch, knee), s) for batch, s in timed if s > 0]
        self._matrix = [[0.0] * (column + 1) for column in range(SIZE)]
        self._target = [0.0] * SIZE
        self._weight = 1.0
        self._ratios.clear()
        self._until_refit = self._interval = FIRST_REFIT

    @property
    def due(self) -> bool:
        """Whether enough iterations were added for a refit."""
        return self._until_refit <= 0

    @property
    def _level(self) -> float:
        """Median ratio of measured to predicted time of recent iterations."""
        return median(self._ratios or (1.0,))

    @property
    def _has_changed(self) -> bool:
        return not 1 / CHANGED_MIN < self._level < CHANGED_MIN

    def add(self, chunks: Iterable[tuple[int, int]], measured_s: float, predicted_s: float) -> None:
        """Learn from an iteration that `model` predicted to take `predicted_s`; both are > 0."""
        if measured_s <= 0 or predicted_s <= 0:
            return
        self._until_refit -= 1
        self._weight *= FADING
        measured_s = max(measured_s, predicted_s / SPEEDUP_MAX)
        self._ratios.append(measured_s / predicted_s)
        error = abs(predicted_s / measured_s - 1)
        weight = self._weight * min(1.0, ERROR_BOUND / error if error else 1.0)
        row = row_apart(chunks, self.model.knee or None)
        _accumulate(self._matrix, self._target, row, measured_s, weight)
        if self._until_refit % RECENT == 0 and self._has_changed:
            self._until_refit = 0

    def refit(self) -> CostModel | None:
        """Correct `model`; returns it if a predicted time has changed noticeably, else None."""
        changed = self._has_changed
        self._interval = FIRST_REFIT if changed else min(LAST_REFIT, 2 * self._interval)
        self._until_refit = self._interval
        fade = (CHANGED_FADING if changed else 1) / self._weight
        self._weight = 1.0
        self._matrix = [[fade * value for value in row] for row in self._matrix]
        self._target = [fade * value for value in self._target]
        matrix, target = [row[:] for row in self._matrix], self._target[:]
        # Relative to its own times, a base that is far too fast would outweigh all iterations.
        slower = max((self.model.batch_s(batch) / s for batch, _, s in self._prior), default=1.0)
        weight = PRIOR_WEIGHT / max(1.0, slower * self._level) ** 2
        for _, row, seconds in self._prior:
            _accumulate(matrix, target, row, seconds, weight)
        knee = self.model.knee or None
        refined = model_apart(solve_normal(matrix, target), knee)
        if not differ(self.model, refined, CHANGE_MIN):
            return None
        self.model = refined
        return refined


def differ(old: CostModel, new: CostModel, least: float) -> bool:
    """Whether the predicted time of any of `PRIOR_BATCHES` changes by more than a share `least`."""
    times = ((old.batch_s(batch), new.batch_s(batch)) for batch in PRIOR_BATCHES)
    return any(abs(new_s - old_s) > least * old_s for old_s, new_s in times)


def _accumulate(
    matrix: list[list[float]],
    target: list[float],
    row: Sequence[float],
    seconds: float,
    weight: float,
) -> None:
    """Add an equation row · x = `seconds`, relative to `seconds`."""
    used = [(column, value / seconds) for column, value in enumerate(row) if value]
    for column, value in used:
        weighted = weight * value
        target[column] += weighted
        sums = matrix[column]
        for other, factor in used:
            if other > column:
                break
            sums[other] += weighted * factor
