"""Round-robin order of owners."""

from random import Random

import pytest

from services.core.round_robin_queue import RoundRobinQueue


def test_owners_alternate_and_entries_of_an_owner_are_in_order() -> None:
    line = RoundRobinQueue[str](100)
    for number in range(50):
        assert line.join("loud", f"loud-{number}")
    assert line.join("late", "late-0") and line.join("late", "late-1")
    assert line.join("later", "later-0")
    taken = [line.next() for _ in range(6)]
    assert taken == ["loud-0", "late-0", "later-0", "loud-1", "late-1", "loud-2"]
    assert len(line) == 47


def test_each_owner_has_its_own_bound() -> None:
    line = RoundRobinQueue[int](2)
    assert line.join("a", 1) and line.join("a", 2) and not line.join("a", 3)
    assert line.join("a", 1), "it waits already"
    assert line.join("b", 3)
    assert line.leave("a", 1) and not line.leave("a", 1) and not line.leave("c", 1)
    assert line.join("a", 4) and len(line) == 3


def test_an_entry_shared_by_owners_leaves_every_queue() -> None:
    line = RoundRobinQueue[str](2)
    for owner, item in (("a", "shared"), ("a", "own"), ("b", "shared"), ("c", "shared")):
        assert line.join(owner, item)
    line.leave_all("shared")
    line.leave_all("unknown")
    assert len(line) == 1 and line.next() == "own" and line.next() is None


def test_a_skipped_owner_keeps_its_turn() -> None:
    line = RoundRobinQueue[str](9)
    for owner, item in (("a", "a1"), ("a", "a2"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        assert line.join(owner, item)
    assert line.next({"a"}) == "b1" and line.next({"a", "b"}) == "c1"
    assert line.next({"a", "b"}) is None and len(line) == 3
    assert [line.next() for _ in range(4)] == ["a1", "b2", "a2", None]


@pytest.mark.parametrize("seed", range(50))
def test_an_entry_waits_for_at_most_one_entry_of_each_other_owner(seed: int) -> None:
    rng = Random(seed)
    line, model = RoundRobinQueue[int](8), dict[str, list[int]]()
    passed: dict[int, dict[str, int]] = {}
    owner_of: dict[int, str] = {}
    for item in range(300):
        step = rng.random()
        if step < 0.5:
            owner = rng.choice("abcd")
            mine = model.setdefault(owner, [])
            joined = line.join(owner, item)
            assert joined is (len(mine) < 8)
            if joined:
                mine.append(item)
                owner_of[item], passed[item] = owner, {}
        elif step < 0.6 and owner_of:
            gone = rng.choice(sorted(owner_of))
            assert line.leave(owner_of[gone], gone)
            model[owner_of.pop(gone)].remove(gone)
        else:
            taken = line.next()
            assert (taken is None) is (not owner_of)
            if taken is not None:
                owner = owner_of.pop(taken)
                before = model[owner].index(taken)
                assert before == 0, "the oldest of its owner"
                model[owner].remove(taken)
                for other in owner_of:
                    counts = passed[other]
                    counts[owner] = counts.get(owner, 0) + 1
                    if owner_of[other] != owner:
                        mine = counts.get(owner_of[other], 0)
                        assert counts[owner] <= mine + 1
        assert len(line) == sum(map(len, model.values())) == len(owner_of)
