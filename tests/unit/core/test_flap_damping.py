"""A worker that leaves often counts as flapping until it has stayed for a while."""

import random

import pytest

from services.core.flap_damping import (
    LEAVES_MAX,
    STEADY_S,
    WINDOW_S,
    WORKERS_MAX,
    FlapDamping,
)


def leave(steadiness: FlapDamping, worker_id: str, *times_s: float) -> None:
    for at_s in times_s:
        steadiness.note_departure(worker_id, at_s)
        steadiness.note_presence(worker_id)
    steadiness.check_invariants()


def test_a_worker_that_leaves_often_flaps_until_it_stays() -> None:
    seen = FlapDamping()
    leave(seen, "w0", *(10.0 * number for number in range(LEAVES_MAX - 1)))
    assert not seen.is_flapping("w0", 20.0)
    leave(seen, "w0", 50.0)
    assert seen.is_flapping("w0", 50.0) and seen.is_flapping("w0", 50.0 + STEADY_S - 1)
    assert not seen.is_flapping("w0", 50.0 + STEADY_S) and not seen.is_flapping("w1", 50.0)
    leave(seen, "w0", 60.0)
    assert seen.is_flapping("w0", 50.0 + STEADY_S), "each leave restarts the time"


def test_leaves_far_apart_do_not_count_together() -> None:
    seen = FlapDamping()
    leave(seen, "w0", *(number * (WINDOW_S / (LEAVES_MAX - 1) + 1) for number in range(10)))
    assert not seen.is_flapping("w0", 0.0)


def test_a_repeated_absence_counts_as_a_single_leave() -> None:
    seen = FlapDamping()
    for at_s in range(10):
        seen.note_departure("w0", float(at_s))
    assert not seen.is_flapping("w0", 10.0)


def test_history_is_bounded_by_number_and_age() -> None:
    seen = FlapDamping()
    for number in range(WORKERS_MAX + 10):
        seen.note_departure(f"w{number}", 0.0)
    seen.check_invariants()
    seen.note_departure("last", 2 * WINDOW_S)
    assert list(seen._departures) == ["last"]


@pytest.mark.parametrize("seed", range(20))
def test_bounded_history_decides_like_the_whole_history(seed: int) -> None:
    rng, seen, now_s = random.Random(seed), FlapDamping(), 0.0
    left_s: dict[str, list[float]] = {name: [] for name in ("a", "b", "c")}
    away = set[str]()
    flapped = 0
    for _ in range(500):
        now_s += rng.choice([0.0, 1.0, 20.0, 90.0])
        name = rng.choice(sorted(left_s))
        if name not in away:
            left_s[name].append(now_s)
            away.add(name)
            seen.note_departure(name, now_s)
        else:
            away.discard(name)
            seen.note_presence(name)
        seen.check_invariants()
        for worker, times_s in left_s.items():
            windows = zip(times_s, times_s[LEAVES_MAX - 1 :], strict=False)
            ends_s = [
                last_s + STEADY_S for first_s, last_s in windows if last_s - first_s <= WINDOW_S
            ]
            flaps = any(now_s < end_s for end_s in ends_s)
            assert seen.is_flapping(worker, now_s) == flaps
            flapped += flaps
    assert flapped > 20
