"""Recent entries are bounded by time and by number."""

import random

from services.worker.engine.transfer.recent import Recent


def test_an_entry_expires_between_one_and_two_lifetimes() -> None:
    for offset_s in (0.0, 1.0, 9.9):
        recent = Recent[str, bool](10.0, 100)
        recent.expire(0.0)
        recent.expire(offset_s)
        recent.add("a", False)
        for now_s in range(10):
            recent.expire(offset_s + now_s)
            assert "a" in recent and recent.get("a") is False
        recent.expire(offset_s + 10.0)
        recent.expire(offset_s + 20.0)
        assert "a" not in recent and recent.get("a") is None and len(recent) == 0


def test_a_repeated_entry_is_updated_and_renewed() -> None:
    recent = Recent[str, int](10.0, 100)
    recent.expire(0.0)
    recent.add("a", 1)
    recent.expire(10.0)
    recent.add("a", 2)
    assert recent.get("a") == 2 and len(recent) == 1
    recent.expire(20.0)
    assert recent.get("a") == 2


def test_the_newest_half_is_kept_within_the_maximum() -> None:
    rng = random.Random(5)
    recent, added = Recent[int, int](10.0, 20), list[int]()
    now_s = 0.0
    for number in range(1000):
        recent.expire(now_s)
        recent.add(number, number)
        added.append(number)
        now_s += rng.random() / 10  # ten in less than `keep_s`
        assert all(recent.get(key) == key for key in added[-10:])
        assert len(recent) <= 20
