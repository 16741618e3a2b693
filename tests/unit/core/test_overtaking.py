"""Overtaking is bounded, and requests otherwise start in order."""

import random
from dataclasses import dataclass

import pytest

from services.core.overtaking import SCAN_MAX, count_overtaken, next_to_start


@dataclass(eq=False)
class Waiter:
    size: int
    overtaken: int = 0


def pick(line: list[Waiter], room: int, overtaken_max: int) -> Waiter | None:
    return next_to_start(line, lambda waiter: waiter.size <= room, overtaken_max)


def test_the_oldest_fitting_request_starts_and_passed_ones_are_counted() -> None:
    line = [Waiter(9), Waiter(8), Waiter(1), Waiter(1)]
    first = next_to_start(line, lambda candidate: candidate.size <= 5, 2)
    assert first is line[2]
    count_overtaken(line, first)
    assert [waiter.overtaken for waiter in line] == [1, 1, 0, 0]


def test_a_limit_of_0_keeps_arrival_order() -> None:
    assert next_to_start([Waiter(9), Waiter(1)], lambda waiter: waiter.size <= 5, 0) is None


def test_search_depth_is_bounded() -> None:
    line = [Waiter(9) for _ in range(SCAN_MAX)] + [Waiter(1)]
    assert next_to_start(line, lambda waiter: waiter.size <= 5, 2) is None
    assert next_to_start(line[1:], lambda waiter: waiter.size <= 5, 2) is line[-1]


@pytest.mark.parametrize("overtaken_max", [0, 1, 5])
@pytest.mark.parametrize("seed", range(30))
def test_overtaking_is_bounded_and_every_request_starts(seed: int, overtaken_max: int) -> None:
    """Room varies; once all of it is free for long enough, the oldest request starts."""
    rng = random.Random(seed)
    line: list[Waiter] = []
    before: dict[Waiter, int] = {}  # how many younger ones have started, counted here
    started, overtook = 0, 0
    for step in range(1500):
        if step < 1000 and rng.random() < 0.6:
            line.append(Waiter(rng.choice([1, 2, 3, 20])))
        room = rng.choice([0, 1, 2, 5, 25]) if step < 1000 else 25
        while (first := pick(line, room, overtaken_max)) is not None:
            place = line.index(first)
            assert first.size <= room and place < SCAN_MAX
            assert all(older.size > room for older in line[:place]), "an older one would fit"
            for older in line[:place]:
                before[older] = before.get(older, 0) + 1
                overtook += 1
            count_overtaken(line, first)
            line.remove(first)
            room -= first.size
            started += 1
        assert all(before.get(waiter, 0) == waiter.overtaken <= overtaken_max for waiter in line)
    assert not line and started > 400
    assert (overtook > 0) == (overtaken_max > 0)
