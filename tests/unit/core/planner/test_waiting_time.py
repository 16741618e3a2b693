"""`scheduling: waiting_time`: the longest-waiting request runs."""

import random

import pytest

from services.core.queue_order import Scheduling
from services.core.service import DEFAULT_SERVICE
from tests.unit.core.planner.test_slo import BATCH, Clock, planner, run_to_the_end


def _clock(**changes: object) -> Clock:
    return Clock(planner(scheduling=Scheduling.WAITING_TIME, **changes))


def test_requests_alternate_and_keep_their_kv() -> None:
    clock = _clock(max_running=2)
    for name in ("a", "b", "c"):
        clock.arrive(name, DEFAULT_SERVICE, output=9)
    ran = [set(clock.run()) for _ in range(7)]
    assert ran[0] == {"a", "b"}
    assert all(len(names) == 2 for names in ran)
    runs = {name: sum(name in names for names in ran) for name in ("a", "b", "c")}
    assert min(runs.values()) >= 4, runs
    assert clock.state.preemptions_total == 0


def test_an_arriving_request_precedes_those_that_just_ran() -> None:
    clock = _clock(max_running=1)
    clock.begin("old", DEFAULT_SERVICE, output=9)
    clock.arrive("new", BATCH, output=9)
    clock.now_s += 1e-3
    assert [*clock.run(), *clock.run(), *clock.run()] == ["new", "old", "new"]


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_complete(seed: int) -> None:
    rng = random.Random(seed)
    clock = _clock(num_blocks=rng.choice((24, 60)), max_running=rng.choice((2, 6, 32)))
    run_to_the_end(clock, rng)
