"""The cost model: its terms, and recovery of coefficients by a fit."""

from dataclasses import replace
from math import inf
from random import Random

import pytest

from services.core.cost.least_squares import solve_nonnegative
from services.core.cost.model import (
    Coefficients,
    CostModel,
    Sample,
    fit,
    fit_apart,
    fit_together,
    mean_model,
    mean_relative_error,
    pairs,
    pooled_models,
)

MODEL = CostModel(alpha=2e-6, beta=3e-3, gamma=0.12, lam=0.1, kappa=1e-5)


def random_samples(model: CostModel, rng: Random, count: int, noise: float = 0.0) -> list[Sample]:
    samples = []
    for _ in range(count):
        chunks = tuple(
            (rng.choice((0, 0, 30, 400, 3000)), rng.choice((1, 1, 2, 16, 64, 256)))
            for _ in range(rng.randint(1, 12))
        )
        samples.append(Sample(chunks, model.batch_s(chunks) * rng.uniform(1 - noise, 1 + noise)))
    return samples


def random_model(rng: Random, apart: bool) -> CostModel:
    lam = rng.choice((0.0, 10 ** rng.uniform(-4, -1)))
    gamma = lam + rng.choice((0.0, 10 ** rng.uniform(-4, -2)))
    own = Coefficients(10 ** rng.uniform(-7, -4), 10 ** rng.uniform(-5, -2), lam)
    return CostModel(
        alpha=10 ** rng.uniform(-9, -5),
        beta=10 ** rng.uniform(-5, -2),
        gamma=gamma,
        lam=lam,
        decode=own if apart else None,
        kappa=rng.choice((0.0, 10 ** rng.uniform(-7, -4))),
    )


def bent(model: CostModel) -> CostModel:
    """A model with a knee, beyond which a token costs three times as much."""
    return replace(model, knee=64, mu=2 * model.beta)


@pytest.mark.parametrize(("prefix", "new"), [(0, 1), (0, 5), (7, 1), (7, 5)])
def test_attention_pairs_are_causal(prefix: int, new: int) -> None:
    visited = sum(1 for row in range(new) for key in range(prefix + new) if key <= prefix + row)
    assert pairs(prefix, new) == visited


def test_weights_are_loaded_once_per_batch() -> None:
    assert MODEL.batch_s([]) == 0
    assert MODEL.batch_s([(0, 256)]) == MODEL.chunk_s(0, 256)
    two = MODEL.chunk_s(0, 64) + MODEL.chunk_s(400, 1) - MODEL.lam
    assert MODEL.batch_s([(0, 64), (400, 1)]) == pytest.approx(two)


def test_tokens_beyond_the_knee_cost_more() -> None:
    model = replace(MODEL, knee=10, mu=0.5)
    assert model.batch_s([(0, 6), (9, 4)]) == MODEL.batch_s([(0, 6), (9, 4)])
    assert model.batch_s([(0, 6), (9, 1), (7, 5)]) == pytest.approx(
        MODEL.batch_s([(0, 6), (9, 1), (7, 5)]) + 2 * 0.5
    )
    assert model.slowed(3).batch_s([(0, 12)]) == pytest.approx(3 * model.batch_s([(0, 12)]))
    more = model.beyond_knee.chunk_s(5, 8) - model.lam
    assert model.batch_s([(0, 20), (5, 8)]) - model.batch_s([(0, 20)]) == pytest.approx(more)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("apart", [False, True])
def test_a_fit_finds_the_knee(seed: int, apart: bool) -> None:
    rng = Random(seed)
    model = bent(replace(random_model(rng, apart), alpha=1e-9))
    fitted = fit(random_samples(model, rng, 80))
    assert mean_relative_error(fitted, random_samples(model, rng, 50)) < 1e-6
    assert fitted.knee == 64 and fitted.mu == pytest.approx(model.mu, rel=1e-3)


def test_decode_uses_its_own_coefficients_if_present() -> None:
    model = CostModel(1.0, 2.0, 3.0, 0.0, Coefficients(0.1, 0.2, 0.3))
    assert model.chunk_s(9, 1) == pytest.approx(0.1 * 10 + 0.2 + 0.3)
    assert model.chunk_s(9, 2) == pytest.approx(1.0 * 21 + 2.0 * 2 + 3.0)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("apart", [False, True])
def test_a_fit_recovers_the_model(seed: int, apart: bool) -> None:
    rng = Random(seed)
    model = random_model(rng, apart)
    samples = random_samples(model, rng, 80)
    fitted = fit(samples)
    unseen = random_samples(model, rng, 50)
    assert mean_relative_error(fitted, unseen) < 1e-6
    if apart:
        assert fitted.decode is not None
        assert fitted.decode.alpha == pytest.approx(model.decode and model.decode.alpha, rel=1e-4)
    assert fitted.alpha == pytest.approx(model.alpha, rel=1e-3)
    assert fitted.beta == pytest.approx(model.beta, rel=1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_noisy_samples_fit_a_plausible_model(seed: int) -> None:
    rng = Random(seed)
    model = random_model(rng, apart=seed % 2 == 0)
    samples = random_samples(model, rng, 60, noise=0.1)
    for fit_one in (fit, fit_together, fit_apart):
        fitted = fit_one(samples)
        values = [fitted.alpha, fitted.beta, fitted.gamma, fitted.lam, fitted.kappa]
        assert all(value >= 0 for value in values)
        assert fitted.lam <= fitted.gamma
        if fitted.decode is not None:
            assert fitted.lam <= fitted.decode.gamma
    assert mean_relative_error(fit(samples), random_samples(model, rng, 50)) < 0.1


def test_outlier_batches_do_not_change_the_fit() -> None:
    true = CostModel(1e-6, 1e-3, 0.02, 0.015, kappa=1e-5)
    points = [((p, c),) for p in (0, 100, 500, 2000) for c in (2, 10, 40, 80, 160)]
    points += [((p, c), (p, c)) for p in (0, 500) for c in (4, 16)]
    samples = [Sample(point, true.batch_s(point)) for point in points]
    odd = [Sample(((2000, 300),), 2 * true.batch_s(((2000, 300),)))]
    assert mean_relative_error(fit_together([*samples, *odd]), samples) < 0.005


def test_a_fit_without_decodes_has_a_single_set_of_coefficients() -> None:
    samples = [Sample(((0, c),), MODEL.chunk_s(0, c)) for c in (2, 8, 32, 128, 256) * 3]
    assert fit(samples).decode is None


@pytest.mark.parametrize("samples", [[], [Sample((), 1.0)], [Sample(((0, 1),), 0.0)]])
def test_a_fit_without_samples_is_an_error(samples: list[Sample]) -> None:
    with pytest.raises(ValueError, match="a fit needs samples"):
        fit(samples)


@pytest.mark.parametrize("seed", range(30))
def test_non_negative_least_squares_is_optimal(seed: int) -> None:
    """Karush-Kuhn-Tucker: no slope where x > 0, none that helps where x = 0."""
    rng = Random(seed)
    rows = [[rng.gauss(0, 1) * 10.0**column for column in range(5)] for _ in range(20)]
    target = [rng.gauss(0, 1) for _ in rows]
    x = solve_nonnegative(rows, target)
    residuals = [
        t - sum(a * v for a, v in zip(r, x, strict=True)) for r, t in zip(rows, target, strict=True)
    ]
    for column in range(5):
        values = [row[column] for row in rows]
        slope = sum(a * r for a, r in zip(values, residuals, strict=True)) / 10.0**column
        assert x[column] >= 0
        assert slope < 1e-8
        assert x[column] == 0 or abs(slope) < 1e-8


def test_collinear_columns_are_handled() -> None:
    rows = [[1.0, 2.0, 0.0], [2.0, 4.0, 0.0], [3.0, 6.0, 0.0]]
    x = solve_nonnegative(rows, [1.0, 2.0, 3.0])
    assert x[0] + 2 * x[1] == pytest.approx(1.0)
    assert x[2] == 0


@pytest.mark.parametrize("seed", range(20))
def test_from_the_amortising_size_on_work_takes_longer_than_the_fixed_cost(seed: int) -> None:
    rng = Random(seed)
    model = random_model(rng, apart=True)
    if seed % 2:
        model = bent(model)
    tokens = model.amortising_tokens(4096)

    def work_s(new: int) -> float:
        return model.chunk_s(0, new) + model.excess_s(new) - model.gamma

    assert 1 <= tokens <= 4096
    assert tokens == 1 or work_s(max(2, tokens - 1)) < model.gamma or tokens == 2
    assert tokens == 4096 or tokens == 1 or work_s(tokens) >= model.gamma


def test_the_amortising_size_is_the_fixed_cost_over_the_cost_of_a_token() -> None:
    """Hockney's n½ of a linear model; everything is amortised without a fixed cost."""
    assert CostModel(0.0, beta=1e-3, gamma=0.1, lam=0.1).amortising_tokens(4096) == 100
    assert CostModel(0.0, beta=1e-3, gamma=0.0, lam=0.0).amortising_tokens(4096) == 1
    assert CostModel(0.0, beta=0.0, gamma=0.1, lam=0.1).amortising_tokens(4096) == 4096
    roofline = CostModel(0.0, beta=0.0, gamma=0.1, lam=0.1, knee=64, mu=1e-3)
    assert roofline.amortising_tokens(4096) == 164


def test_a_mean_model_predicts_the_mean_of_each_batch() -> None:
    models = [random_model(Random(seed), apart=seed % 2 == 0) for seed in range(6)]
    mean = mean_model(models)
    for chunks in (((0, 64),), ((300, 16),), ((80, 1),) * 5, ((80, 1), (0, 32))):
        expected_s = sum(model.batch_s(chunks) for model in models) / len(models)
        assert mean.batch_s(chunks) == pytest.approx(expected_s)


def test_models_of_the_same_device_are_pooled() -> None:
    model = random_model(Random(0), apart=True)
    fast, fast_too, slow, alone = (model.slowed(factor) for factor in (1.0, 1.2, 3.0, 9.0))
    broken = replace(model, beta=inf)
    models = {"a": slow, "b": fast, "c": alone, "d": fast_too, "e": slow, "f": broken}
    pooled = pooled_models(models)
    assert pooled == models | dict.fromkeys("bd", mean_model([fast, fast_too]))
    assert pooled_models({}) == {}
