"""The index of host copies: eviction and retention."""

import random

import pytest

from services.core.host.host_cache import HostCache


def filled(*names: bytes, slots: int = 8) -> HostCache:
    cache = HostCache()
    cache.grow(slots)
    for name in names:
        cache.reserve(name, reported=False)
        cache.hold(name)
    return cache


def evicted(cache: HostCache) -> list[bytes]:
    gone = []
    while (lost := cache.evict()) is not None:
        gone.append(lost.block_hash)
    cache.check_invariants()
    return gone


def test_a_copy_is_found_once_it_is_complete() -> None:
    cache = HostCache()
    cache.grow(2)
    assert cache.reserve(b"a", reported=False) == 0
    assert b"a" in cache and not list(cache.find([b"a"])) and cache.filling == 1
    cache.hold(b"a")
    assert list(cache.find([b"a", b"b"])) == [0] and (cache.held, cache.empty) == (1, 1)
    cache.check_invariants()


def test_the_least_recently_used_copy_is_evicted_first() -> None:
    cache = filled(b"a", b"b", b"c")
    cache.touch([b"b", b"a"])
    assert evicted(cache) == [b"c", b"b", b"a"]


def test_pinned_copies_are_not_evicted() -> None:
    cache = filled(b"a", b"b")
    cache.owe([b"a", b"later"])
    cache.owe([b"a"])
    cache.reserve(b"later", reported=False)
    cache.hold(b"later")
    assert evicted(cache) == [b"b"] and cache.owed == 2
    cache.settle([b"a", b"later"])
    assert evicted(cache) == [b"later"] and cache.owed == 1
    cache.settle([b"a"])
    assert evicted(cache) == [b"a"] and cache.owed == 0


def test_a_copy_in_use_stays_even_if_damaged() -> None:
    cache = filled(b"a")
    cache.begin_read([b"a"])
    cache.begin_read([b"a"])
    assert evicted(cache) == []
    assert cache.drop(b"a") is None and not list(cache.find([b"a"]))
    assert cache.end_read([b"a"]) == [] and b"a" in cache
    assert [lost.block_hash for lost in cache.end_read([b"a"])] == [b"a"] and b"a" not in cache
    cache.check_invariants()


def test_a_lost_store_has_no_slots_and_can_grow_again() -> None:
    cache = filled(b"a", b"b")
    cache.owe([b"a"])
    assert [lost.block_hash for lost in cache.clear()] == [b"a", b"b"] and cache.slots == 0
    cache.grow(4)
    cache.settle([b"a"])
    cache.check_invariants()
    with pytest.raises(ValueError, match="cannot grow"):
        cache.grow(3)


@pytest.mark.parametrize("seed", range(30))
def test_slots_are_never_lost_or_shared(seed: int) -> None:
    rng = random.Random(seed)
    cache = HostCache()
    cache.grow(6)
    names = [bytes([number]) for number in range(10)]
    filling, owed, read = list[bytes](), list[bytes](), list[bytes]()
    for _ in range(300):
        name = rng.choice(names)
        match rng.randrange(8):
            case 0 | 1 if name not in cache and (cache.empty or cache.evict() is not None):
                cache.reserve(name, rng.random() < 0.5)
                filling.append(name)
            case 2 if filling:
                name = filling.pop(rng.randrange(len(filling)))
                if rng.random() < 0.7:
                    cache.hold(name)
                else:
                    assert cache.drop(name) is not None
            case 3:
                cache.owe([name])
                owed.append(name)
            case 4 if owed:
                cache.settle([owed.pop(rng.randrange(len(owed)))])
            case 5 if list(cache.find([name])):
                cache.begin_read([name])
                read.append(name)
            case 6 if read:
                cache.end_read([read.pop(rng.randrange(len(read)))])
            case 7 if name not in filling:
                cache.drop(name)
        cache.check_invariants()
