"""A cost model is refined by the iterations of a worker."""

from dataclasses import replace
from random import Random
from statistics import median
from time import perf_counter

import pytest

from services.core.cost.model import Chunks, Coefficients, CostModel
from services.core.cost.refinement import FIRST_REFIT, PRIOR_BATCHES, CostRefiner, differ

TRUE = CostModel(
    alpha=2e-8, beta=6e-4, gamma=0.012, lam=0.011, decode=Coefficients(2e-6, 1e-3, 0.011)
)


def off_by(factor: float) -> CostModel:
    """A rough model: prompt tokens off by `factor`, decodes by its inverse."""
    assert TRUE.decode is not None
    decode = replace(TRUE.decode, beta=TRUE.decode.beta / factor)
    return replace(TRUE, beta=TRUE.beta * factor, decode=decode)


def served(rng: Random) -> Chunks:
    """An iteration of a server: decodes, and often a prompt."""
    decodes = tuple((rng.randint(20, 900), 1) for _ in range(rng.randint(0, 16)))
    prompt = ((rng.choice((0, 0, 200)), rng.randint(2, 200)),)
    return decodes + prompt if rng.random() < 0.4 or not decodes else decodes


def median_error(model: CostModel, rng: Random, true: CostModel = TRUE) -> float:
    batches = [served(rng) for _ in range(200)]
    return median(abs(model.batch_s(b) / true.batch_s(b) - 1) for b in batches)


def learn(
    refiner: CostRefiner,
    rng: Random,
    count: int,
    noise: float = 0.0,
    pauses: float = 0.0,
    instant: float = 0.0,
    true: CostModel = TRUE,
) -> None:
    """`pauses`, `instant`: shares of iterations that take seconds longer, or a 1000th."""
    for _ in range(count):
        batch = served(rng)
        measured_s = true.batch_s(batch) * rng.uniform(1 - noise, 1 + noise)
        if rng.random() < pauses:
            measured_s += rng.uniform(0.1, 5.0)
        if rng.random() < instant:
            measured_s /= 1000
        refiner.add(batch, measured_s, refiner.model.batch_s(batch))
        if refiner.due:
            refiner.refit()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("factor", [0.4, 0.7, 1.5, 3.0])
def test_a_wrong_sketch_is_corrected(seed: int, factor: float) -> None:
    rng = Random(seed)
    refiner = CostRefiner(off_by(factor))
    before = median_error(refiner.model, rng)
    learn(refiner, rng, 1000, noise=0.1)
    after = median_error(refiner.model, rng)
    assert after < min(0.06, before), (before, after)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("factor", [0.02, 0.1, 10.0, 50.0])
def test_a_base_that_is_far_off_is_corrected_as_fast(factor: float, seed: int) -> None:
    rng = Random(seed)
    refiner = CostRefiner(TRUE.slowed(factor))
    learn(refiner, rng, 400, noise=0.05)
    assert median_error(refiner.model, rng) < 0.1
    learn(refiner, rng, 1600, noise=0.05)
    assert median_error(refiner.model, rng) < 0.03


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("pauses", "instant"), [(0.05, 0.0), (0.0, 0.01), (0.05, 0.01)])
def test_outliers_hardly_change_the_model(pauses: float, instant: float, seed: int) -> None:
    """One of 20 iterations takes up to some hundred times as long, or one of 100 a 1000th."""
    rng = Random(seed)
    refiner = CostRefiner(TRUE)
    learn(refiner, rng, 2000, 0.05, pauses, instant)
    assert median_error(refiner.model, rng) < 0.06


@pytest.mark.parametrize("seed", range(4))
def test_the_model_follows_a_device_that_slows_down(seed: int) -> None:
    rng = Random(seed)
    refiner = CostRefiner(TRUE.slowed(0.5))
    learn(refiner, rng, 3000)
    assert median_error(refiner.model, rng) < 0.03


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("factor", [0.2, 1.5, 3.0, 5.0])
def test_a_change_of_the_device_is_followed_within_some_hundred_iterations(
    factor: float, seed: int
) -> None:
    rng = Random(seed)
    refiner, after = CostRefiner(TRUE), TRUE.slowed(factor)
    learn(refiner, rng, 4000 + rng.randrange(512), noise=0.05)
    learn(refiner, rng, 500, noise=0.05, true=after)
    assert median_error(refiner.model, rng, after) < 0.1


@pytest.mark.parametrize("factor", [0.2, 3.0])
def test_alternating_prompts_and_decodes_keep_both_fits(factor: float) -> None:
    """Neither phase alone determines the coefficients of the other."""
    rng, errors = Random(5), []
    refiner = CostRefiner(off_by(factor))
    for number in range(4000):
        if number // 400 % 2:
            batch: Chunks = ((rng.choice((0, 200)), rng.randint(2, 200)),)
        else:
            batch = tuple((rng.randint(20, 900), 1) for _ in range(rng.randint(1, 16)))
        measured_s, predicted_s = TRUE.batch_s(batch), refiner.model.batch_s(batch)
        errors.append(abs(predicted_s / measured_s - 1))
        refiner.add(batch, measured_s, predicted_s)
        if refiner.due:
            refiner.refit()
    assert sorted(errors[2000:])[1800] < 0.05


def test_coefficients_without_samples_keep_the_base_value() -> None:
    """Decodes only, twice as slow: prompts keep about their predicted time."""
    refiner, rng = CostRefiner(TRUE), Random(1)
    for _ in range(2000):
        batch = tuple((rng.randint(20, 900), 1) for _ in range(rng.randint(1, 16)))
        refiner.add(batch, 2 * TRUE.batch_s(batch), refiner.model.batch_s(batch))
        if refiner.due:
            refiner.refit()
    long_s = TRUE.batch_s(((0, 256),))
    assert refiner.model.batch_s(((0, 256),)) == pytest.approx(long_s, rel=0.2)
    decodes = ((300, 1),) * 8
    assert refiner.model.batch_s(decodes) == pytest.approx(2 * TRUE.batch_s(decodes), rel=0.1)


def test_an_accurate_model_is_unchanged() -> None:
    refiner, rng = CostRefiner(TRUE), Random(2)
    for _ in range(FIRST_REFIT):
        batch = served(rng)
        assert not refiner.due
        refiner.add(batch, TRUE.batch_s(batch), TRUE.batch_s(batch))
    assert refiner.due
    assert refiner.refit() is None and refiner.model is TRUE


def test_coefficients_are_never_negative_and_shared_costs_never_exceed_a_chunk() -> None:
    for seed in range(60):
        rng = Random(seed)
        refiner = CostRefiner(TRUE)
        for _ in range(200):
            batch = served(rng)
            refiner.add(batch, rng.uniform(1e-4, 1.0), refiner.model.batch_s(batch))
        model = refiner.refit() or refiner.model
        decode = model.decode
        assert decode is not None
        numbers = (model.alpha, model.beta, model.lam, model.kappa, model.mu)
        assert min(*numbers, decode.alpha, decode.beta, decode.gamma) >= 0
        assert model.lam <= model.gamma


def test_a_refinement_begins_again_from_a_new_profile() -> None:
    refiner, rng = CostRefiner(TRUE.slowed(3)), Random(3)
    learn(refiner, rng, 100)
    refiner.restart(TRUE)
    assert refiner.model is TRUE and not refiner.due
    learn(refiner, rng, 500)
    assert not differ(refiner.model, TRUE, 0.05)


def test_equal_devices_with_short_prompts_agree_on_long_prompts() -> None:
    """Noise must not be extrapolated: a pair of tokens hardly matters in the loads."""
    times_s = []
    for seed in range(20):
        refiner, rng = CostRefiner(TRUE), Random(seed)
        for _ in range(400):
            batch = ((0, rng.choice((64, 128, 256))),)
            seconds = TRUE.batch_s(batch) * rng.uniform(0.8, 1.2)
            refiner.add(batch, seconds, refiner.model.batch_s(batch))
            if refiner.due:
                refiner.refit()
        times_s.append(refiner.model.chunk_s(0, 2048))
    assert max(times_s) < 1.3 * min(times_s)


def test_changes_are_detected_in_any_batch() -> None:
    assert not differ(TRUE, TRUE.slowed(1.02), 0.03)
    assert differ(TRUE, TRUE.slowed(1.04), 0.03)
    assert differ(TRUE, replace(TRUE, beta=2 * TRUE.beta), 0.2), "prompts only"
    assert all(TRUE.batch_s(batch) > 0 for batch in PRIOR_BATCHES)


def test_the_update_takes_few_microseconds() -> None:
    """Including refits. The bound is generous, as tests run on busy machines."""
    refiner, rng = CostRefiner(TRUE), Random(4)
    batches = [served(rng) for _ in range(512)]
    costs = [(batch, TRUE.batch_s(batch)) for batch in batches]
    best_s = float("inf")
    for _ in range(5):
        began_s = perf_counter()
        for batch, seconds in costs:
            refiner.add(batch, seconds, seconds)
        refiner.refit()
        best_s = min(best_s, (perf_counter() - began_s) / len(costs))
    assert best_s < 100e-6, f"{best_s * 1e6:.1f} us"
