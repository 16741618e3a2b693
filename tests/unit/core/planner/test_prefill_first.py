"""`scheduling: prefill_first`: iterations of whole prompts, and decodes when there are none."""

import random

import pytest

from services.core.queue_order import Scheduling
from services.core.service import DEFAULT_SERVICE
from tests.unit.core.planner.test_slo import BATCH, Clock, planner, run_to_the_end


def _clock(**changes: object) -> Clock:
    return Clock(planner(scheduling=Scheduling.PREFILL_FIRST, **changes))


def test_decodes_wait_while_prompts_run() -> None:
    clock = _clock(max_batch_tokens=100)
    clock.begin("old", BATCH, output=9)
    for name in ("a", "b", "c"):
        clock.arrive(name, DEFAULT_SERVICE, prompt=45, output=3)
    assert clock.run() == {"a": 45, "b": 45}, "the third one is not cut to fit"
    assert clock.run() == {"c": 45}
    assert clock.run() == {"old": 1, "a": 1, "b": 1, "c": 1}
    assert len(clock.tokens["old"]) == 2, "three iterations without it"


def test_requests_start_in_arrival_order_for_all_classes() -> None:
    clock = _clock(max_running=1)
    clock.arrive("batch", BATCH, output=3)
    clock.arrive("online", DEFAULT_SERVICE, output=3)
    assert [next(iter(clock.run())) for _ in range(6)] == ["batch"] * 3 + ["online"] * 3


def test_a_prompt_longer_than_an_iteration_runs_in_pieces_without_decodes() -> None:
    clock = _clock(max_batch_tokens=64)
    clock.begin("old", DEFAULT_SERVICE, output=9)
    clock.arrive("long", DEFAULT_SERVICE, prompt=150, output=3)
    clock.arrive("short", DEFAULT_SERVICE, prompt=40, output=3)
    ran = [clock.run() for _ in range(4)]
    assert ran[:3] == [{"long": 64}, {"long": 64}, {"long": 22, "short": 40}]
    assert ran[3] == {"old": 1, "long": 1, "short": 1}


def test_a_preempted_decode_is_a_prompt_again() -> None:
    clock = _clock(num_blocks=8)
    clock.arrive("first", DEFAULT_SERVICE, prompt=12, output=20)
    clock.begin("second", DEFAULT_SERVICE, prompt=12, output=20)
    while clock.state.preemptions_total == 0:
        ran = clock.run()
    assert ran == {"first": 1}
    while "second" not in ran:
        ran = clock.run()
    assert ran == {"second": 12 + len(clock.tokens["second"]) - 1}


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_complete(seed: int) -> None:
    rng = random.Random(seed)
    clock = _clock(
        num_blocks=rng.choice((24, 60, 200)),
        max_running=rng.choice((2, 6, 32)),
        max_batch_tokens=rng.choice((32, 64)),
        prefix_caching=rng.random() < 0.5,
    )
    run_to_the_end(clock, rng)
