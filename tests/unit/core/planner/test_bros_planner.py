"""`scheduling: bros`: batches as packed in the BROS paper."""

import random

import pytest

from services.core.queue_order import Scheduling
from tests.unit.core.planner.test_slo import BATCH, MODEL, Clock, planner, promised, run_to_the_end


def _clock(**changes: object) -> Clock:
    return Clock(planner(scheduling=Scheduling.BROS, **changes))


def test_the_least_residual_time_bounds_an_iteration() -> None:
    clock = _clock()
    clock.begin("online", promised(tpot_s=0.03), output=40)
    clock.arrive("small", BATCH, prompt=100, output=40)
    clock.arrive("large", BATCH, prompt=200, output=40)
    assert clock.run() == {"online": 1, "small": 100}, "a prompt is not cut to fit"
    assert clock.plan is not None and clock.plan.predicted_s <= 0.03
    for _ in range(10):
        assert "large" not in clock.run()


def test_a_batch_request_takes_the_turn_of_the_online_one_with_most_time() -> None:
    clock = _clock()
    clock.begin("filler", BATCH, output=60)
    clock.arrive("tight", promised(tpot_s=0.0135), output=60)
    clock.arrive("middle", promised(tpot_s=0.1), output=60)
    clock.begin("patient", promised(tpot_s=0.5), output=60)
    assert MODEL.batch_s([(9, 1)] * 3) < 0.0135 < MODEL.batch_s([(9, 1)] * 4)
    assert clock.run().keys() == {"tight", "middle", "filler"}


def test_the_bound_keeps_prompts_out_and_resets_the_slots() -> None:
    clock = _clock(max_running=8)
    clock.begin("tight", promised(tpot_s=0.02), output=60)
    planned = clock.state._planner
    assert planned.slots.limit == 8  # type: ignore[union-attr]
    clock.arrive("new", promised(ttft_s=9.0), prompt=200)
    assert clock.run() == {"tight": 1}, "it would be too late with a whole prompt beside it"
    assert planned.slots.limit == 4  # type: ignore[union-attr]


def test_an_urgent_prompt_precedes_decodes_with_slack() -> None:
    clock = _clock()
    clock.begin("decodes", promised(tpot_s=5.0), output=60)
    clock.arrive("urgent", promised(ttft_s=0.0305), prompt=170)
    assert MODEL.batch_s([(0, 170)]) < 0.0305 < MODEL.batch_s([(0, 170), (9, 8)])
    assert "urgent" in clock.run()


def test_infeasible_targets_do_not_bound_iterations() -> None:
    clock = _clock()
    clock.arrive("late", promised(ttft_s=0.0001, tpot_s=0.0001), prompt=200, output=9)
    clock.arrive("other", promised(tpot_s=5.0), prompt=50, output=9)
    assert clock.run() == {"late": 200, "other": 50}


@pytest.mark.parametrize("seed", range(24))
def test_random_loads_complete(seed: int) -> None:
    rng = random.Random(seed)
    clock = _clock(
        num_blocks=rng.choice((24, 60, 200)),
        max_running=rng.choice((2, 6, 32)),
        max_batch_tokens=rng.choice((32, 64, 256)),
        prefix_caching=rng.random() < 0.5,
        cost_model=None if rng.random() < 0.2 else MODEL,
    )
    clock.slow = rng.choice((0.7, 1.0, 2.0))
    run_to_the_end(clock, rng)
