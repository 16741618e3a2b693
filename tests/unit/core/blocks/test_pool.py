import random

import pytest

from services.core.blocks.pool import BlockPool


@pytest.mark.parametrize("seed", range(10))
def test_random_use_keeps_the_invariants(seed: int) -> None:
    rng, pool, owned = random.Random(seed), BlockPool(50), []
    for _ in range(500):
        if owned and rng.random() < 0.5:
            pool.release(owned.pop(rng.randrange(len(owned))))
        elif (count := rng.randint(1, 8)) <= pool.free_count:
            owned.append(pool.allocate(count))
        pool.check_invariants()
        assert pool.free_count == 50 - sum(map(len, owned))


def test_too_many_or_a_double_free_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(IndexError):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.release(blocks)
    pool.check_invariants()
