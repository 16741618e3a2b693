"""Evicted prefixes as reported to a scheduler."""

from services.core.planner.block_pool import BlockPool
from services.core.prefix.block_hash import thin_hash
from services.core.prefix.cached_blocks import EVICTED_MAX, EvictedPrefixes


def test_a_reader_gets_only_new_evictions() -> None:
    dropped = EvictedPrefixes()
    assert dropped.since(0) == ()
    for digest in (5, 6, 7):
        dropped.note(digest)
    assert dropped.since(0) == (5, 6, 7)
    assert dropped.since(2) == (7,)
    assert dropped.since(dropped.total) == ()


def test_only_the_newest_evictions_are_kept() -> None:
    dropped = EvictedPrefixes()
    for number in range(3 * EVICTED_MAX):
        dropped.note(number)
    assert dropped.since(0) == tuple(range(2 * EVICTED_MAX, 3 * EVICTED_MAX))


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_only_blocks_known_to_a_scheduler_are_reported() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for number, block in enumerate(blocks):
        pool.cache.register(block, name_of(number), reported=number % 2 == 0)
    pool.release(blocks)
    pool.check_invariants()
    pool.allocate(3)
    pool.check_invariants()
    assert pool.cache.evictions.since(0) == (thin_hash(name_of(0)), thin_hash(name_of(2)))


def test_a_moved_block_is_reported_when_it_is_dropped() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.cache.register(block, name_of(9), reported=True)
    pool.move(block)
    pool.check_invariants()
    assert pool.cache.evictions.total == 0
    pool.limit(0)
    pool.release(tuple(pool.users))
    pool.check_invariants()
    assert pool.cache.evictions.since(0) == (thin_hash(name_of(9)),)
