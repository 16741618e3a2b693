"""The independent count of hits, by example and against a reference cache."""

import random

from benchmarks.prefix_count import CountedCache


def test_a_prompt_that_continues_another_hits_its_full_blocks() -> None:
    cache = CountedCache(blocks=100, block_size=4)
    first = tuple(range(10))
    assert cache.request(first, (100, 101, 102, 103)) == 0
    # The cache has 13 tokens: the last output was never run.
    assert cache.request((*first, 100, 101, 102, 103, 7, 8, 9)) == 12
    assert (cache.queries, cache.hits) == (10 + 17, 12)


def test_prefix_count_equals_a_reference_cache() -> None:
    """The reference keeps each prefix as a tuple and scans all of them."""
    rng = random.Random(3)
    size, blocks = 2, 12
    cache, kept, hits = CountedCache(blocks, size), list[tuple[int, ...]](), 0
    for _ in range(600):
        prompt = tuple(rng.randrange(2) for _ in range(rng.randrange(1, 14)))
        begun = [prompt[:end] for end in range(size, len(prompt) + 1, size)]
        for beginning in begun[: (len(prompt) - 1) // size]:
            if beginning not in kept:
                break
            hits += size
        kept = [prefix for prefix in kept if prefix not in begun] + begun[::-1]
        kept = kept[-blocks:]
        cache.request(prompt)
        assert cache.hits == hits
    assert 0 < hits < cache.queries
