"""Bounds of buckets: near-minimal padding, number of batches, bisection of the paper."""

from itertools import accumulate
from math import inf
from pathlib import Path
from random import Random

import pytest

from services.core.scheduler.bucket_bounds import (
    BUCKETS_MAX,
    adaptive_bounds,
    batch_size,
    bisected_bounds,
    bucket_of,
)
from tideserve.load.traces import AZURE_CODE, AZURE_CONVERSATIONS, load_trace

NEAR = 1.15


def padding(lengths: list[int], bounds: tuple[int, ...]) -> int:
    """Padding tokens if each request is padded to the longest of its bucket (eq. 2-3)."""
    buckets: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    for length in lengths:
        buckets[bucket_of(length, bounds)].append(length)
    return sum(max(of, default=0) * len(of) - sum(of) for of in buckets)


def least_padding(ordered: list[int], buckets: int) -> int:
    """The exact optimum, by dynamic programming over the sorted lengths."""
    before = [0, *accumulate(ordered)]
    best = [0.0, *[inf] * len(ordered)]
    for _ in range(buckets):
        best = [0.0] + [
            min(best[i] + ordered[j - 1] * (j - i) - (before[j] - before[i]) for i in range(j))
            for j in range(1, len(ordered) + 1)
        ]
    return round(best[-1])


def lengths_of(trace: Path, number: int, rng: Random) -> list[int]:
    rows = load_trace(trace).rows
    return sorted(row.prompt_tokens + row.output_tokens for row in rng.sample(rows, number))


def mixed_lengths(rng: Random, number: int) -> list[int]:
    """Short instructions and long documents, the mixture of the paper."""
    return sorted(
        round(rng.lognormvariate(4.2, 0.6)) + 1
        if rng.random() < 0.8
        else min(4096, round(rng.lognormvariate(8, 0.7)) + 1)
        for _ in range(number)
    )


def zipf_lengths(rng: Random, number: int) -> list[int]:
    """Prompt and output lengths by Zipf's law with exponent 1.1, as in the BurstGPT paper."""
    ranks = range(1, 4097)
    weights = [rank**-1.1 for rank in ranks]
    parts = [rng.choices(ranks, weights, k=number) for _ in range(2)]
    return sorted(map(sum, zip(*parts, strict=True)))


@pytest.mark.parametrize("batches", [1.5, 4, 9, 50])
@pytest.mark.parametrize("kind", ["conversations", "code", "mixed", "zipf"])
def test_the_padding_is_near_the_optimum(kind: str, batches: float) -> None:
    rng = Random(f"{kind} {batches}")
    for number in (40, 150):
        if kind == "mixed":
            ordered = mixed_lengths(rng, number)
        elif kind == "zipf":
            ordered = zipf_lengths(rng, number)
        else:
            trace = AZURE_CODE if kind == "code" else AZURE_CONVERSATIONS
            ordered = lengths_of(trace, number, rng)
        bounds = adaptive_bounds(ordered, sum(ordered) / batches)
        assert 2 <= len(bounds) <= BUCKETS_MAX
        assert padding(ordered, bounds) <= NEAR * least_padding(ordered, len(bounds))


def test_the_padding_of_512_conversations_is_near_the_optimum() -> None:
    ordered = lengths_of(AZURE_CONVERSATIONS, 512, Random(1))
    bounds = adaptive_bounds(ordered, sum(ordered) / 6)
    assert len(bounds) == 6
    assert padding(ordered, bounds) <= NEAR * least_padding(ordered, 6)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_are_few_and_ascending_and_cover_all_requests(seed: int) -> None:
    rng = Random(seed)
    spread = rng.choice([1, 3, 100, 10**6])
    ordered = sorted(rng.randrange(spread) + 1 for _ in range(rng.randrange(1, 600)))
    for batches in (0.5, 3, 1000):
        bounds = adaptive_bounds(ordered, sum(ordered) / batches)
        assert list(bounds) == sorted(set(bounds))
        assert bounds[-1] == ordered[-1]
        assert len(bounds) <= min(BUCKETS_MAX, len(set(ordered)))
        used = {bucket_of(length, bounds) for length in ordered}
        assert used == set(range(len(bounds))), "no bucket is empty"


def test_requests_that_fit_together_share_a_bucket() -> None:
    assert adaptive_bounds([10, 20, 3000], 3030) == (3000,)
    assert adaptive_bounds([10, 20, 3000], 3029) == (20, 3000)
    assert adaptive_bounds([], 0) == ()


def test_equal_lengths_share_a_bucket_however_many_wait() -> None:
    assert adaptive_bounds([700] * 500, 100) == (700,)


def test_mass_in_the_upper_half_is_split() -> None:
    """The rule of the paper never separates requests of 2,100 and 4,000 tokens."""
    lengths = [2100] * 50 + [4000] * 50
    assert adaptive_bounds(sorted(lengths), 20_000) == (2100, 4000)
    bounds = (4096,)
    for _ in range(5):
        bounds = bisected_bounds(bounds, lengths, 20_000, 4096)
    assert bounds == (4096,)


def test_the_bisection_of_the_paper_splits_once_per_pass() -> None:
    lengths = [3500] * 10 + [100] * 30 + [900] * 2
    first = bisected_bounds((), lengths, 7_000, 4095)
    assert first == (2047, 4095)
    second = bisected_bounds(first, lengths, 7_000, 4095)
    assert second == (1023, 2047, 4095)
    third = bisected_bounds(second, lengths, 7_000, 4095)
    assert third == (511, 1023, 2047, 4095)
    assert bisected_bounds(third, lengths, 10**6, 4095) == (4095,), "less than a batch waits"


def test_the_bisection_of_the_paper_is_bounded() -> None:
    bounds: tuple[int, ...] = ()
    for _ in range(40):
        bounds = bisected_bounds(bounds, [1] * 50 + [2, 5, 9, 17, 40, 100], 1.0, 2**20)
        assert len(bounds) <= BUCKETS_MAX
    assert len(bounds) == BUCKETS_MAX


def test_a_batch_takes_fitting_requests_in_order() -> None:
    assert batch_size([5, 5, 5], 10) == 2
    assert batch_size([50, 1, 1], 10) == 0
    assert batch_size([1, 2], inf) == 2
