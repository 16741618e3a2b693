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


def test_overallocation_and_double_free_are_errors() -> None:
    pool = BlockPool(2)
    with pytest.raises(IndexError):
        pool.allocate(3)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(KeyError):
        pool.release(blocks)
    pool.check_invariants()


def test_low_ids_are_allocated_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(4) == (0, 1, 2, 3)
    pool.release((3, 1))
    assert pool.next_free == 1
    assert pool.allocate(3) == (1, 3, 4)
    pool.check_invariants()


def test_a_limit_withholds_free_and_freed_blocks() -> None:
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


def _named(pool: BlockPool, *names: bytes) -> tuple[int, ...]:
    """Released blocks that still hold these prefixes."""
    blocks = pool.allocate(len(names))
    for block, name in zip(blocks, names, strict=True):
        pool.cache.register(block, name)
    pool.release(reversed(blocks))
    return blocks


def test_a_cached_block_is_free_until_it_is_shared() -> None:
    pool = BlockPool(4)
    first, second = _named(pool, b"a", b"b")
    assert (pool.free_count, pool.taken_count) == (4, 0)
    assert list(pool.cache.find([b"a", b"b", b"c"])) == [first, second]
    pool.share((first, second))
    assert (pool.free_count, pool.taken_count) == (2, 2)
    pool.share((first,))
    pool.release((second, first))
    assert pool.users == {first: 1} and pool.free_count == 3
    pool.release((first,))
    assert pool.free_count == 4
    pool.check_invariants()


def test_empty_blocks_are_taken_before_cached_ones_and_the_oldest_of_these_first() -> None:
    pool = BlockPool(5)
    old = _named(pool, b"a", b"b")
    new = _named(pool, b"c", b"d")
    pool.share(old[:1])
    pool.release(old[:1])
    assert pool.next_free == 4
    # The end of a prefix is forgotten before its beginning.
    assert pool.allocate(5) == (4, old[1], new[1], new[0], old[0])
    assert not list(pool.cache.find([b"a"]))
    pool.check_invariants()


def test_blocks_with_the_same_prefix_share_a_name() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    for block, name in ((first, b"a"), (second, b"a"), (first, b"b")):
        pool.cache.register(block, name)
    pool.release((first, second))
    assert list(pool.cache.find([b"a"])) == [first] and not list(pool.cache.find([b"b"]))
    assert pool.next_free == second, "it has no name, and is empty"
    pool.check_invariants()


def test_above_a_limit_cached_blocks_are_dropped_and_used_ones_move() -> None:
    pool = BlockPool(6)
    blocks = _named(pool, *(bytes([number]) for number in range(6)))
    pool.share(blocks[5:])
    pool.limit(3)
    assert pool.free_count == 3 and not list(pool.cache.find([bytes([4])]))
    target = pool.move(blocks[5])
    assert target < 3 and list(pool.cache.find([bytes([5])])) == [target]
    pool.shrink(3)
    pool.release((target,))
    pool.grow(4)
    assert pool.free_count == 4
    pool.clear_cache()
    assert pool.free_count == 4 and pool.cache.idle_count == 0
    assert pool.allocate(4) == (0, 1, 2, 3)
    pool.check_invariants()


@pytest.mark.parametrize("seed", range(20))
def test_random_use_with_shared_prefixes_keeps_the_invariants(seed: int) -> None:
    """A block is shared only under the name that it had when it was filled."""
    rng, pool = random.Random(seed), BlockPool(30)
    content: dict[int, bytes] = {}
    tables: list[tuple[int, ...]] = []
    for number in range(400):
        names = [bytes([rng.randrange(4), depth]) for depth in range(rng.randint(1, 5))]
        cached = tuple(pool.cache.find(names))
        assert [content[block] for block in cached] == names[: len(cached)]
        if rng.random() < 0.5 and pool.free_count >= len(names):
            pool.share(cached)
            fresh = pool.allocate(len(names) - len(cached))
            content.update(zip(fresh, names[len(cached) :], strict=True))
            for block in fresh:
                pool.cache.register(block, content[block])
            tables.append((*cached, *fresh))
        elif tables:
            pool.release(reversed(tables.pop(rng.randrange(len(tables)))))
        if rng.random() < 0.1:
            pool.limit(rng.randint(10, pool.num_blocks))
        if number % 100 == 99:
            pool.clear_cache()
        pool.check_invariants()
        assert pool.taken_count == len({block for table in tables for block in table})
    for table in tables:
        pool.release(table)
    assert pool.free_count == pool.usable
