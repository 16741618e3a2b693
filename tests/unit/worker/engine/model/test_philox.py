"""The counter-based generator against numpy's."""

import math

import numpy as np

from services.core.request import Sampling
from services.worker.engine.model.cpu_kernels.philox import uniform_numbers
from services.worker.engine.sampling.request_state import RequestDraws
from tests.support.sampling import uniform

SEEDS = (-1, 0, 7, 12345, 2**63, 2**70)


def numbers(pairs: list[tuple[int, int]]) -> np.ndarray:
    """The random numbers of these outputs, each a seed and an index."""
    keys = np.array([RequestDraws(Sampling(seed=seed)).key for seed, _ in pairs], np.uint64)
    return uniform_numbers(keys, np.array([index for _, index in pairs], np.uint64))


def test_philox_equals_numpy_and_depends_on_seed_and_index_only() -> None:
    pairs = [(seed, index) for seed in SEEDS for index in (*range(100), 2**32 - 1, 2**40)]
    expected = [uniform(seed, index) for seed, index in pairs]
    assert numbers(pairs).tolist() == expected
    assert numbers(pairs[::-1]).tolist() == expected[::-1]
    assert len(set(expected)) == len(pairs)


def test_philox_numbers_are_uniform() -> None:
    values = numbers([(3, index) for index in range(4000)])
    counts, _ = np.histogram(values, bins=10, range=(0, 1))
    assert values.min() >= 0 and values.max() < 1
    assert abs(counts - 400).max() < 5 * math.sqrt(400)
