"""How long an iteration takes: the cost of a chunk, of a batch, and the fit from measurements.

A chunk of `c` new tokens after `p` tokens in the KV cache costs

    α · (p·c + (c² + c)/2) + β · c + γ + κ · p

and a batch costs the sum of its n chunks less (n − 1) · λ, the work that the chunks share, such as
loading parameters. That is KunServe §4.3, eq. 1-3, with κ added: a chunk reads its prefix from
memory once, however few tokens it has. Without κ, chunks of few tokens after a long prefix were
predicted at half of what they took on a CPU. Decode steps (c = 1) may have coefficients of their
own (BROS §4.1); for them κ is part of α. Up to some number of new tokens in a batch, the *knee*,
reading the parameters hides part of the computing (a roofline); each token beyond it costs μ more.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, sqrt

TOLERANCE = 1e-12
"""A smaller slope of the residual along a unit column, relative to the target's length, is none."""


def solve_nonnegative(rows: Sequence[Sequence[float]], target: Sequence[float]) -> list[float]:
    """x ≥ 0 that minimises |rows · x − target|² (the active-set method of NNLS).

    Columns are scaled to unit length first, so their sizes do not matter; a column of zeros, or
    one that the others make up already, gets 0.
    """
    norms = [sqrt(sum(value * value for value in column)) for column in zip(*rows, strict=True)]
    unit = [[v / n if n else 0.0 for v, n in zip(row, norms, strict=True)] for row in rows]
    size = len(norms)
    solution = [0.0] * size
    passive: list[int] = []
    rejected: set[int] = set()
    threshold = TOLERANCE * sqrt(sum(value * value for value in target))
    while True:
        slopes = _slopes(unit, target, solution)
        idle = [i for i in range(size) if i not in passive and i not in rejected]
        entering = max(idle, key=lambda i: slopes[i], default=None)
        if entering is None or slopes[entering] <= threshold:
            return [x / n if n else 0.0 for x, n in zip(solution, norms, strict=True)]
        candidate = _restricted(unit, target, [*passive, entering])
        if candidate is None or candidate[-1] <= 0:
            # Rounding, or a column that depends on those in use: it cannot help.
            rejected.add(entering)
            continue
        rejected.clear()
        passive.append(entering)
        _descend(unit, target, solution, passive)


def _descend(
    unit: Sequence[Sequence[float]],
    target: Sequence[float],
    solution: list[float],
    passive: list[int],
) -> None:
    """Move `solution` to the best one over `passive`; columns that would turn negative leave."""
    while passive:
        candidate = _restricted(unit, target, passive)
        if candidate is None:
            return
        negative = [(i, x) for i, x in zip(passive, candidate, strict=True) if x <= 0]
        step = min((solution[i] / (solution[i] - x) for i, x in negative), default=1.0)
        for index, wanted in zip(passive, candidate, strict=True):
            solution[index] += step * (wanted - solution[index])
        if not negative:
            return
        leaving = {i for i, x in negative if solution[i] <= TOLERANCE} or {negative[0][0]}
        for index in leaving:
            solution[index] = 0.0
            passive.remove(index)


def _slopes(
    unit: Sequence[Sequence[float]], target: Sequence[float], solution: Sequence[float]
) -> list[float]:
    """How fast the error falls along each column."""
    residuals = [
        wanted - sum(a * x for a, x in zip(row, solution, strict=True))
        for row, wanted in zip(unit, target, strict=True)
    ]
    return [
        sum(a * r for a, r in zip(column, residuals, strict=True))
        for column in zip(*unit, strict=True)
    ]


def _restricted(
    unit: Sequence[Sequence[float]], target: Sequence[float], columns: Sequence[int]
) -> list[float] | None:
    """Least squares over some columns by modified Gram-Schmidt; None if they are dependent."""
    basis: list[list[float]] = []
    upper: list[list[float]] = []
    for index in columns:
        vector = [row[index] for row in unit]
        projections = []
        for one in basis:
            share = sum(a * b for a, b in zip(one, vector, strict=True))
            projections.append(share)
            vector = [v - share * a for v, a in zip(vector, one, strict=True)]
        length = sqrt(sum(v * v for v in vector))
        if length < 1e-10:
            return None
        basis.append([v / length for v in vector])
        upper.append([*projections, length])
    rest = list(target)
    heights = []
    for one in basis:
        share = sum(a * b for a, b in zip(one, rest, strict=True))
        heights.append(share)
        rest = [r - share * a for r, a in zip(rest, one, strict=True)]
    solution = [0.0] * len(columns)
    for index in reversed(range(len(columns))):
        known = sum(
            upper[later][index] * solution[later] for later in range(index + 1, len(columns))
        )
        solution[index] = (heights[index] - known) / upper[index][index]
    return solution


Chunks = tuple[tuple[int, int], ...]
"""(prefix tokens, new tokens) of every chunk of a batch."""

FOLDS = 5
"""Parts of the samples, each predicted once from the others, to choose between fits."""

KNEES = (8, 16, 32, 64, 128, 256)
KNEE_GAIN = 0.1
"""Part by which a knee must reduce the error to be kept."""

REWEIGHTINGS = 8
"""After so many steps the error hardly falls any more."""

ERROR_FLOOR = 0.01
"""Relative errors below this one count as equal: they are noise of the clock."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Cost of a chunk: `alpha` s per attended pair, `beta` s per new token, `gamma` s at all."""

    alpha: float
    beta: float
    gamma: float

    def chunk_s(self, prefix: int, new: int) -> float:
        """Seconds of a chunk alone."""
        return self.alpha * pairs(prefix, new) + self.beta * new + self.gamma

    def slowed(self, factor: float) -> "Coefficients":
        """The coefficients of a device on which everything takes `factor` times as long."""
        return Coefficients(self.alpha * factor, self.beta * factor, self.gamma * factor)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds; `lam` ≤ `gamma` is what each chunk of a batch but one saves.

    `decode` holds for chunks of one token; None means that the same coefficients do. Each new token
    of a batch beyond the first `knee` costs `mu` more.
    """

    alpha: float
    beta: float
    gamma: float
    lam: float
    decode: Coefficients | None = None
    kappa: float = 0.0
    knee: int = 0
    mu: float = 0.0

    def chunk_s(self, prefix: int, new: int) -> float:
        """Seconds of `new` ≥ 1 tokens after `prefix` tokens, alone and as if before the knee."""
        if new == 1 and self.decode is not None:
            return self.decode.chunk_s(prefix, new)
        attention_s = self.alpha * pairs(prefix, new) + self.kappa * prefix
        return attention_s + self.beta * new + self.gamma

    def batch_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of an iteration of these (prefix, new) chunks; 0 without any."""
        total_s, count, tokens = 0.0, 0, 0
        for prefix, new in chunks:
            total_s += self.chunk_s(prefix, new)
            count += 1
            tokens += new
        return total_s - max(0, count - 1) * self.lam + self.excess_s(tokens)

    def decodes_s(self, decodes: int, prefix_tokens: int, count: int = 1) -> float:
        """Seconds of `count` iterations of the same decodes, each of which gains a token in each.

        `prefix_tokens` is the sum of their prefixes in the first. O(1).
        """
        prefix_sum = count * prefix_tokens + decodes * (count * (count - 1) // 2)
        shared = count * (decodes - 1)
        seconds = self.decodes_alone_s(count * decodes, prefix_sum)
        return seconds + (count * self.excess_s(decodes) - shared * self.lam)

    def decodes_alone_s(self, decodes: int, prefix_tokens: int) -> float:
        """Cost of decodes without what a batch shares: linear in their number and prefixes."""
        alone_s = self.chunk_s(0, 1)
        return decodes * alone_s + prefix_tokens * (self.chunk_s(1, 1) - alone_s)

    def excess_s(self, tokens: int) -> float:
        """What a batch of so many new tokens costs for those beyond the knee."""
        return self.mu * max(0, tokens - self.knee)

    def tokens_within(self, prefix: int, seconds: float, most: int) -> int:
        """How many tokens of a chunk, up to `most`, add no more than `seconds` to a batch.

        The batch runs anyway; those tokens are as if before the knee.
        """
        seconds -= self.gamma - self.lam + self.kappa * prefix
        if seconds <= 0:
            return 0
        linear = self.alpha * (prefix + 0.5) + self.beta
        if seconds == inf or not linear:
            return most
        if not self.alpha:
            return min(most, int(seconds / linear))
        root = sqrt(linear * linear + 2 * self.alpha * seconds)
        return min(most, int((root - linear) / self.alpha))

    @property
    def beyond_knee(self) -> "CostModel":
        """For batches that are beyond the knee anyway, what a further chunk adds to them."""
        return replace(self, beta=self.beta + self.mu, knee=0, mu=0.0)

    def slowed(self, factor: float) -> "CostModel":
        """The coefficients of a device on which everything takes `factor` times as long."""
        decode = self.decode.slowed(factor) if self.decode is not None else None
        return CostModel(
            self.alpha * factor,
            self.beta * factor,
            self.gamma * factor,
            self.lam * factor,
            decode,
            self.kappa * factor,
            self.knee,
            self.mu * factor,
        )


TOKENS = CostModel(alpha=0.0, beta=1.0, gamma=0.0, lam=0.0)
"""What a token costs as long as nothing has been measured: one unit."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured iteration: (prefix, new) of its chunks, and its duration."""

    chunks: Chunks
    measured_s: float


Fit = Callable[[Sequence[Sample]], CostModel]


def pairs(prefix: int, new: int) -> float:
    """Query-key pairs that causal attention visits."""
    return prefix * new + (new * new + new) / 2


def fit(samples: Sequence[Sample]) -> CostModel:
    """The model with the least mean relative error: one or two sets of coefficients, a knee?

    That is decided by cross-validation, the place of the knee by the error on all samples; two sets
    need chunks of both phases. Raises ValueError without samples or when one has no chunk or no
    positive duration.
    """
    if not samples or any(not s.chunks or s.measured_s <= 0 for s in samples):
        raise ValueError("a fit needs samples, each with a chunk and a positive duration")
    phases = {new == 1 for sample in samples for _, new in sample.chunks}
    if len(phases) < 2 or len(samples) < 2 * FOLDS:
        return fit_together(samples)
    errors = {one: _cross_validated(one, samples) for one in (fit_together, fit_apart)}
    best = min(errors, key=lambda one: errors[one])
    knees = [partial(best, knee=knee) for knee in KNEES]
    bent = min(knees, key=lambda one: mean_relative_error(one(samples), samples))
    if _cross_validated(bent, samples) < errors[best] * (1 - KNEE_GAIN):
        return bent(samples)
    return best(samples)


def fit_together(samples: Sequence[Sample], knee: int | None = None) -> CostModel:
    """One set of coefficients for prefill and decode.

    A batch costs α·Σpairs + β·Σnew + δ·n + λ + κ·Σprefix with δ = γ − λ, and μ for each token
    beyond the `knee`, if there is one: all of them are ≥ 0.
    """
    rows = [
        (
            sum(pairs(p, c) for p, c in sample.chunks),
            float(sum(c for _, c in sample.chunks)),
            float(len(sample.chunks)),
            1.0,
            float(sum(p for p, _ in sample.chunks)),
            _excess(sample, knee),
        )
        for sample in samples
    ]
    alpha, beta, delta, lam, kappa, mu = _solve(rows, samples)
    return CostModel(alpha, beta, lam + delta, lam, None, kappa, knee or 0, mu)


def fit_apart(samples: Sequence[Sample], knee: int | None = None) -> CostModel:
    """Prefill and decode apart, λ and μ shared. A decode is one token: its β is also its γ − λ."""
    rows = []
    for sample in samples:
        prefills = [(p, c) for p, c in sample.chunks if c > 1]
        decodes = [p for p, c in sample.chunks if c == 1]
        rows.append(
            (
                sum(pairs(p, c) for p, c in prefills),
                float(sum(c for _, c in prefills)),
                float(len(prefills)),
                sum(pairs(p, 1) for p in decodes),
                float(len(decodes)),
                1.0,
                float(sum(p for p, _ in prefills)),
                _excess(sample, knee),
            )
        )
    alpha, beta, delta, decode_alpha, decode_beta, lam, kappa, mu = _solve(rows, samples)
    decode = Coefficients(decode_alpha, decode_beta, lam)
    return CostModel(alpha, beta, lam + delta, lam, decode, kappa, knee or 0, mu)


def mean_relative_error(model: CostModel, samples: Sequence[Sample]) -> float:
    """Mean of |predicted − measured| / measured; 0 without samples."""
    errors = [abs(model.batch_s(s.chunks) - s.measured_s) / s.measured_s for s in samples]
    return sum(errors) / len(errors) if errors else 0.0


def _excess(sample: Sample, knee: int | None) -> float:
    """New tokens of the batch beyond the knee; 0 without one."""
    return 0.0 if knee is None else float(max(0, sum(c for _, c in sample.chunks) - knee))


def _solve(rows: Sequence[tuple[float, ...]], samples: Sequence[Sample]) -> list[float]:
    """Coefficients ≥ 0 for which |row · coefficients / measured - 1| is least on average.

    By least squares, again and again, each with weights from the errors of the one before. Squares
    alone would follow the few batches that fit no line, such as the longest.
    """
    relative = [
        [value / sample.measured_s for value in row]
        for row, sample in zip(rows, samples, strict=True)
    ]
    coefficients = solve_nonnegative(relative, [1.0] * len(relative))
    for _ in range(REWEIGHTINGS):
        errors = [abs(_dot(row, coefficients) - 1.0) for row in relative]
        weights = [max(error, ERROR_FLOOR) ** -0.5 for error in errors]
        weighted = [
            [weight * value for value in row] for row, weight in zip(relative, weights, strict=True)
        ]
        coefficients = solve_nonnegative(weighted, weights)
    return coefficients


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _cross_validated(fit_one: Fit, samples: Sequence[Sample]) -> float:
    """Mean relative error on samples that the fit has not seen."""
    total = 0.0
    for fold in range(FOLDS):
        seen = [sample for index, sample in enumerate(samples) if index % FOLDS != fold]
        unseen = samples[fold::FOLDS]
        total += mean_relative_error(fit_one(seen), unseen) * len(unseen)
    return total / len(samples)
