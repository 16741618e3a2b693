import random

import pytest

from services.core.planner.block_pool import BlockPool


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


def test_low_ids_go_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(4) == (0, 1, 2, 3)
    pool.release((3, 1))
    assert pool.lowest_free == 1
    assert pool.allocate(3) == (1, 3, 4)
    pool.check_invariants()


def test_a_limit_withholds_what_is_free_and_what_falls_free() -> None:
    pool = BlockPool(6)
    pool.allocate(5)
    pool.limit(3)
    assert pool.free_count == 0 and pool.usable == 3
    pool.release((1, 4))
    assert pool.allocate(1) == (1,) and pool.free_count == 0
    with pytest.raises(ValueError, match="3 is taken"):
        pool.shrink(3)
    pool.release((3,))
    pool.check_invariants()
    pool.shrink(3)
    assert pool.num_blocks == 3 and pool.taken_count == 3
    pool.grow(8)
    assert pool.free_count == 5 and pool.usable == 8
    pool.check_invariants()


def test_sizes_are_checked() -> None:
    pool = BlockPool(4)
    with pytest.raises(ValueError, match="grow"):
        pool.grow(3)
    with pytest.raises(ValueError, match="shrink"):
        pool.shrink(5)
    with pytest.raises(ValueError, match="limit"):
        pool.limit(5)
    pool.limit(2)
    pool.shrink(3)
    assert pool.usable == 2, "a lower limit stays"
    pool.limit(3)
    assert pool.free_count == 3
