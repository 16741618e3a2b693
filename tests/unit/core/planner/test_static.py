"""`execution: static`: a batch runs until its last request ends, then the next one starts."""

import random

import pytest

from services.core.cost.padded import Execution
from services.core.planner.preemption import Preempt
from services.core.queue_order import Scheduling
from services.core.service import DEFAULT_SERVICE
from tests.unit.core.planner.test_slo import BATCH, Clock, planner, run_to_the_end


def _clock(**changes: object) -> Clock:
    return Clock(planner(execution=Execution.STATIC, **changes))


def test_the_next_batch_starts_after_the_last_request_of_the_current() -> None:
    clock = _clock(max_running=2)
    clock.arrive("short", BATCH, prompt=20, output=2)
    clock.arrive("long", BATCH, prompt=20, output=5)
    clock.arrive("next", BATCH, prompt=20, output=2)
    assert clock.run() == {"short": 20, "long": 20}
    assert clock.run() == {"short": 1, "long": 1}
    ran = [clock.run() for _ in range(4)]
    assert ran == [{"long": 1}, {"long": 1}, {"long": 1}, {"next": 20}]


def test_prompts_run_before_decodes() -> None:
    clock = _clock(max_batch_tokens=64)
    for name in ("a", "b"):
        clock.arrive(name, DEFAULT_SERVICE, prompt=50, output=3)
    assert [clock.run() for _ in range(3)] == [{"a": 50, "b": 14}, {"b": 36}, {"a": 1, "b": 1}]


def test_a_batch_fits_into_the_memory_with_its_longest_outputs() -> None:
    blocks, size = 20, planner().config.block_size
    clock = _clock(num_blocks=blocks)
    length = 4 * size
    for number in range(9):
        clock.arrive(f"r{number}", BATCH, prompt=length // 2, output=length // 2)
    first = clock.run()
    assert len(first) == int(0.9 * blocks * size) // length
    while clock.state.sequences:
        clock.run()
    assert clock.state.preemptions_total == 0


def test_an_online_request_waits_for_the_batch() -> None:
    clock = _clock(scheduling=Scheduling.SLO)
    assert clock.state.config.preemption is Preempt.OFF
    clock.arrive("batch", BATCH, prompt=20, output=3)
    assert clock.run() == {"batch": 20}
    clock.arrive("online", DEFAULT_SERVICE, prompt=20, output=3)
    assert [clock.run() for _ in range(3)] == [{"batch": 1}, {"batch": 1}, {"online": 20}]


@pytest.mark.parametrize("scheduling", [Scheduling.FCFS, Scheduling.PRIORITY])
@pytest.mark.parametrize("seed", range(6))
def test_random_loads_complete(seed: int, scheduling: Scheduling) -> None:
    rng = random.Random(seed)
    clock = _clock(
        scheduling=scheduling,
        num_blocks=rng.choice((24, 60, 200)),
        max_running=rng.choice((2, 6, 32)),
        max_batch_tokens=rng.choice((32, 64)),
        prefix_caching=rng.random() < 0.5,
    )
    run_to_the_end(clock, rng)
