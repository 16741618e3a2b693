"""A worker with a limit of sequences gets no more, even with free KV."""

import random

import pytest

from services.core.scheduler.group_load import GroupLoad
from services.core.scheduler.vocabulary import ServingGroup
from tests.support.reports import load_reported


def load_of(**report: int) -> GroupLoad:
    load = GroupLoad(ServingGroup("g", 1, "w", "i", "address", "m", 100, 16, 1600))
    load.note_report(load_reported(0.0, "w", 1, free=100, total=100, **report))
    return load


def test_reservations_and_waiting_sequences_count() -> None:
    load = load_of(running=2, waiting=1, most=5)
    assert load.start_blocks == 99
    load.reserve("a", 1, 0.0)
    assert not load.is_full and load.start_blocks == 98
    load.reserve("b", 1, 0.0)
    assert load.is_full and load.start_blocks == 0
    load.release("a")
    assert not load.is_full and load.start_blocks == 98


def test_without_a_limit_only_blocks_count() -> None:
    load = load_of(running=50)
    assert not load.is_full and not load.is_full_for_batch
    assert load.start_blocks == 75


def test_a_lack_of_blocks_stays_visible() -> None:
    load = load_of(running=4, wanted=120, most=4)
    assert load.start_blocks == -22


@pytest.mark.parametrize(("most", "batch"), [(1, 1), (2, 1), (4, 3), (8, 6), (100, 75)])
def test_batch_requests_leave_slots_to_others(most: int, batch: int) -> None:
    before = load_of(running=batch - 1, batch_running=batch - 1, most=most)
    assert before.batch_start_blocks > 0
    before.reserve("b", 1, 0.0, batch=True)
    assert before.batch_start_blocks <= 0
    full = load_of(running=batch, batch_running=batch, most=most)
    assert full.batch_start_blocks <= 0
    assert (full.start_blocks > 0) == (batch < most)


@pytest.mark.parametrize("seed", range(20))
def test_no_assignment_exceeds_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randrange(1, 9)
    load, active = load_of(most=most), 0
    for step in range(200):
        if load.start_blocks > 0 and rng.random() < 0.6:
            load.reserve(f"r{step}", 1, 0.0)
            active += 1
        elif active and rng.random() < 0.5:
            active -= 1
            names = tuple(f"r{earlier}" for earlier in range(step))
            report = load_reported(
                0.0, "w", step + 2, running=active, free=100, total=100, received=names, most=most
            )
            load.note_report(report)
        assert 0 <= active <= most
        load.check_invariants()
