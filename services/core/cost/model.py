"""Predicts the duration of an iteration from its chunks, with coefficients fitted to measurements.

A chunk is a run of consecutive tokens of a sequence that an iteration computes. A chunk of `c` new
tokens after `p` tokens in the KV cache costs

    α · (p·c + (c² + c)/2) + β · c + γ + κ · p

and a batch costs the sum of its n chunks minus (n − 1) · λ, the work that chunks share, such as
loading parameters. This is KunServe §4.3, eq. 1-3, with κ added: a chunk reads its prefix from
memory once, however few tokens it has. Without κ, short chunks after a long prefix were predicted
at half of their time on a CPU. Decode steps (c = 1) may have their own coefficients (BROS §4.1);
their α includes κ, since a decode has one pair per prefix token. Up to a number of new tokens per
batch, the *knee*, reading the parameters hides part of the computation (roofline); each token
beyond it costs μ more.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite, sqrt

from services.core.cost.least_squares import solve_nonnegative

Chunks = tuple[tuple[int, int], ...]
"""(prefix tokens, new tokens) of every chunk of a batch."""

FOLDS = 5
"""Folds of the cross-validation that chooses between fits."""

KNEES = (8, 16, 32, 64, 128, 256)
"""Candidates for the knee, in new tokens per batch."""
KNEE_GAIN = 0.1
"""Fraction by which a knee must reduce the cross-validated error to be used."""

REWEIGHTINGS = 8
"""Steps of the reweighted least squares; further steps hardly reduce the error."""

ERROR_FLOOR = 0.01
"""Relative errors below this have the same weight: they are noise of the timer."""


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Seconds of a chunk: `alpha` per query-key pair, `beta` per new token, `gamma` constant."""

    alpha: float
    beta: float
    gamma: float

    def chunk_s(self, prefix: int, new: int) -> float:
        """Seconds of a chunk on its own."""
        return self.alpha * pairs(prefix, new) + self.beta * new + self.gamma

    def slowed(self, factor: float) -> "Coefficients":
        """The coefficients of a device that is slower by `factor`."""
        return Coefficients(self.alpha * factor, self.beta * factor, self.gamma * factor)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in seconds; see the module's docstring. `lam` is its λ.

    `lam` ≤ `gamma` is saved by every chunk of a batch but the first. `decode` applies to chunks of
    one token; None: the same coefficients. New tokens beyond the first `knee` of a batch cost `mu`
    more each.
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
        """Seconds of a chunk of `new` ≥ 1 tokens after `prefix`, alone and without the knee's μ."""
        if new == 1 and self.decode is not None:
            return self.decode.chunk_s(prefix, new)
        attention_s = self.alpha * pairs(prefix, new) + self.kappa * prefix
        return attention_s + self.beta * new + self.gamma

    def batch_s(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Seconds of an iteration with these (prefix, new) chunks; 0 without chunks."""
        total_s, count, tokens = 0.0, 0, 0
        for prefix, new in chunks:
            total_s += self.chunk_s(prefix, new)
            count += 1
            tokens += new
        return total_s - max(0, count - 1) * self.lam + self.excess_s(tokens)

    def decodes_s(self, decodes: int, prefix_tokens: int, count: int = 1) -> float:
        """Seconds of `count` iterations of the same decodes, whose prefixes grow in each.

        `prefix_tokens` is the sum of their prefixes in the first iteration. O(1).
        """
        # The prefixes grow by a token per iteration: their sum is an arithmetic series.
        prefix_sum = count * prefix_tokens + decodes * (count * (count - 1) // 2)
        shared = count * (decodes - 1)
        seconds = self.decodes_alone_s(count * decodes, prefix_sum)
        return seconds + (count * self.excess_s(decodes) - shared * self.lam)

    def decodes_alone_s(self, decodes: int, prefix_tokens: int) -> float:
        """Seconds of decodes if each ran alone: linear in their number and prefix tokens."""
        alone_s = self.chunk_s(0, 1)
        return decodes * alone_s + prefix_tokens * (self.chunk_s(1, 1) - alone_s)

    def excess_s(self, tokens: int) -> float:
        """Extra seconds of a batch of `tokens` new tokens, for those beyond the knee."""
        return self.mu * max(0, tokens - self.knee)

    def tokens_within(self, prefix: int, seconds: float, most: int) -> int:
        """The largest chunk, up to `most` tokens, that adds at most `seconds` to a batch.

        The batch is not empty, so the chunk saves λ. The knee is ignored, see `beyond_knee`.
        """
        seconds -= self.gamma - self.lam + self.kappa * prefix
        if seconds <= 0:
            return 0
        # Solve α·c²/2 + linear·c = seconds for c.
        linear = self.alpha * (prefix + 0.5) + self.beta
        if seconds == inf or not linear:
            return most
        if not self.alpha:
            return min(most, int(seconds / linear))
        root = sqrt(linear * linear + 2 * self.alpha * seconds)
        return min(most, int((root - linear) / self.alpha))

    def amortising_tokens(self, most: int) -> int:
        """The least prompt chunk whose own work takes as long as its fixed cost γ; up to `most`.

        At that size, half of the time is work: the half-performance length n½ of R. W. Hockney.
        """
        low, high = 1, max(1, most)
        while low < high:
            new = (low + high) // 2
            work_s = self.alpha * pairs(0, new) + self.beta * new + self.excess_s(new)
            low, high = (low, new) if work_s >= self.gamma else (new + 1, high)
        return low

    @property
    def beyond_knee(self) -> "CostModel":
        """The model in which each new token costs μ more, for chunks beyond the knee."""
        return replace(self, beta=self.beta + self.mu, knee=0, mu=0.0)

    def slowed(self, factor: float) -> "CostModel":
        """The coefficients of a device that is slower by `factor`."""
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


def mean_model(models: Sequence[CostModel]) -> CostModel:
    """A model whose times are about the means of those of one or more `models`.

    Each prompt token costs as beyond the knee.
    """
    rows = []
    for model in models:
        own = model.beyond_knee
        lone_s = own.chunk_s(0, 1)
        per_prefix_s = own.chunk_s(1, 1) - lone_s
        decode = (per_prefix_s, lone_s - per_prefix_s - own.lam)
        rows.append((own.alpha, own.beta, own.gamma, own.lam, own.kappa, *decode))
    alpha, beta, gamma, lam, kappa, decode_alpha, decode_beta = (
        sum(column) / len(rows) for column in zip(*rows, strict=True)
    )
    return CostModel(alpha, beta, gamma, lam, Coefficients(decode_alpha, decode_beta, lam), kappa)


POOLED_PROMPT = 1024
"""Tokens of the prompt whose predicted time shows whether two models are of the same device."""
POOLED_MAX = 1.3
"""Largest ratio of the times of models that differ by learning alone: from loads, with noise."""


def pooled_models(models: Mapping[str, CostModel]) -> dict[str, CostModel]:
    """For each model the mean of those that are probably of the same device.

    These are neighbours in the order of their times, each within `POOLED_MAX` of the next.
    """
    times = {name: model.beyond_knee.chunk_s(0, POOLED_PROMPT) for name, model in models.items()}
    pooled, pool = dict(models), list[str]()
    for name in sorted(filter(lambda name: isfinite(times[name]), times), key=times.__getitem__):
        if pool and times[name] > POOLED_MAX * times[pool[-1]]:
            pooled |= _pooled(models, pool)
            pool = []
        pool.append(name)
    return pooled | _pooled(models, pool)


def _pooled(models: Mapping[str, CostModel], pool: Sequence[str]) -> dict[str, CostModel]:
    distinct = {models[name] for name in pool}
    if len(distinct) < 2:
        return {}
    return dict.fromkeys(pool, mean_model([models[name] for name in pool]))


TOKEN_COSTS = CostModel(alpha=0.0, beta=1.0, gamma=0.0, lam=0.0)
"""Stands in for a missing cost model: the cost of a batch is its number of new tokens."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured iteration: the (prefix, new) tokens of its chunks, and its duration in seconds."""

    chunks: Chunks
    measured_s: float


Fit = Callable[[Sequence[Sample]], CostModel]


def pairs(prefix: int, new: int) -> float:
    """Query-key pairs that causal attention computes."""
    return prefix * new + (new * new + new) / 2


def fit(samples: Sequence[Sample]) -> CostModel:
    """Fit a cost model to measurements.

    Cross-validation decides whether decodes have their own coefficients, and whether there is a
    knee, whose position then has the least error on all samples. Without both prefill and decode
    chunks, or with few samples, there is neither.

    Raises:
        ValueError: without samples, or if a sample has no chunk or no positive duration.
    """
    if not samples or any(not s.chunks or s.measured_s <= 0 for s in samples):
        raise ValueError("a fit needs samples, each with a chunk and a positive duration")
    phases = {new == 1 for sample in samples for _, new in sample.chunks}
    if len(phases) < 2 or len(samples) < 2 * FOLDS:
        return fit_together(samples)
    errors = {method: _cross_validated(method, samples) for method in (fit_together, fit_apart)}
    best = min(errors, key=lambda method: errors[method])
    knees = [partial(best, knee=knee) for knee in KNEES]
    with_knee = min(knees, key=lambda method: mean_relative_error(method(samples), samples))
    # A knee is an additional parameter: accept it only for a clear gain on unseen samples.
    if _cross_validated(with_knee, samples) < errors[best] * (1 - KNEE_GAIN):
        return with_knee(samples)
    return best(samples)


def fit_together(samples: Sequence[Sample], knee: int | None = None) -> CostModel:
    """Fit the same coefficients to prefill and decode.

    A batch costs α·Σpairs + β·Σnew + δ·n + λ + κ·Σprefix with δ = γ − λ, and μ per token beyond
    the `knee`, if given. All coefficients are ≥ 0.
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
    """Fit prefill and decode separately, with common λ and μ; a decode's β includes γ − λ."""
    return model_apart(_solve([row_apart(s.chunks, knee) for s in samples], samples), knee)


def row_apart(chunks: Iterable[tuple[int, int]], knee: int | None) -> tuple[float, ...]:
    """What the coefficients of `model_apart` are multiplied with, for a batch of these chunks."""
    pair_count = 0.0
    new_tokens = prefills = decode_pairs = decodes = prefixes = 0
    for prefix, new in chunks:
        if new == 1:
            decode_pairs += prefix + 1
            decodes += 1
        else:
            pair_count += pairs(prefix, new)
            new_tokens += new
            prefills += 1
            prefixes += prefix
    excess = 0 if knee is None else max(0, new_tokens + decodes - knee)
    return (pair_count, new_tokens, prefills, decode_pairs, decodes, 1.0, prefixes, excess)


def model_apart(coefficients: Sequence[float], knee: int | None) -> CostModel:
    """The cost model with the coefficients of `row_apart`, in its order."""
    alpha, beta, delta, decode_alpha, decode_beta, lam, kappa, mu = coefficients
    decode = Coefficients(decode_alpha, decode_beta, lam)
    return CostModel(alpha, beta, lam + delta, lam, decode, kappa, knee or 0, mu)


def mean_relative_error(model: CostModel, samples: Sequence[Sample]) -> float:
    """Mean of |predicted − measured| / measured; 0 without samples."""
    errors = [abs(model.batch_s(s.chunks) - s.measured_s) / s.measured_s for s in samples]
    return sum(errors) / len(errors) if errors else 0.0


def _excess(sample: Sample, knee: int | None) -> float:
    """New tokens of the batch beyond the knee; 0 without a knee."""
    return 0.0 if knee is None else float(max(0, sum(c for _, c in sample.chunks) - knee))


def _solve(rows: Sequence[tuple[float, ...]], samples: Sequence[Sample]) -> list[float]:
    """Coefficients ≥ 0 that minimise the mean of |row · coefficients / measured - 1|.

    Iteratively reweighted least squares. Plain least squares would fit outliers, such as the
    longest batches, at the cost of all others.
    """
    # Divide by the measured time: relative errors, so that short iterations count as much.
    relative = [
        [value / sample.measured_s for value in row]
        for row, sample in zip(rows, samples, strict=True)
    ]
    coefficients = solve_nonnegative(relative, [1.0] * len(relative))
    for _ in range(REWEIGHTINGS):
        errors = [abs(_dot(row, coefficients) - 1.0) for row in relative]
        # w² · error² = |error|: weighted squares become absolute errors.
        weights = [max(error, ERROR_FLOOR) ** -0.5 for error in errors]
        weighted = [
            [weight * value for value in row] for row, weight in zip(relative, weights, strict=True)
        ]
        coefficients = solve_nonnegative(weighted, weights)
    return coefficients


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _cross_validated(method: Fit, samples: Sequence[Sample]) -> float:
    """Mean relative error of `method` on the samples of each fold, fitted to the others."""
    total = 0.0
    for fold in range(FOLDS):
        seen = [sample for index, sample in enumerate(samples) if index % FOLDS != fold]
        unseen = samples[fold::FOLDS]
        total += mean_relative_error(method(seen), unseen) * len(unseen)
    return total / len(samples)
