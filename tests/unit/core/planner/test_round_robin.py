"""`scheduling: round_robin`: iterations of online and of batch work alternate."""

import random

import pytest

from services.core.queue_order import Scheduling
from services.core.service import DEFAULT_SERVICE
from tests.unit.core.planner.test_slo import BATCH, Clock, planner


def clock(**changes: object) -> Clock:
    return Clock(planner(scheduling=Scheduling.ROUND_ROBIN, **changes))


def test_iterations_alternate_while_both_kinds_have_work() -> None:
    clock_ = clock()
    clock_.arrive("online", DEFAULT_SERVICE, prompt=300, output=3)
    clock_.arrive("batch", BATCH, prompt=300, output=3)
    turns = [clock_.run() for _ in range(9)]
    assert [list(ran) for ran in turns[:8]] == [["online"], ["batch"]] * 4
    assert turns[8] == {} and not clock_.state.sequences


def test_a_kind_without_work_skips_its_turn() -> None:
    clock_ = clock()
    clock_.arrive("batch", BATCH, output=6)
    assert [list(clock_.run()) for _ in range(2)] == [["batch"]] * 2
    clock_.arrive("online", DEFAULT_SERVICE, output=3)
    assert [list(clock_.run()) for _ in range(3)] == [["online"], ["batch"], ["online"]]


def test_a_request_without_room_is_not_starved_by_the_other_kind() -> None:
    clock_ = clock(num_blocks=24, max_running=8)
    clock_.begin("first", BATCH, prompt=40, output=8)
    clock_.arrive("large", DEFAULT_SERVICE, prompt=88, output=2)
    for number in range(400):
        clock_.begin(f"b{number}", BATCH, prompt=8, output=8)
        if "large" in clock_.tokens:
            break
    assert "large" in clock_.tokens


@pytest.mark.parametrize("seed", range(12))
def test_random_loads_complete(seed: int) -> None:
    rng = random.Random(seed)
    clock_ = clock(
        num_blocks=rng.choice((24, 60, 200)),
        max_running=rng.choice((2, 6, 32)),
        max_batch_tokens=rng.choice((32, 64)),
    )
    wanted: dict[str, int] = {}
    for step in range(3000):
        if step < 150 and rng.random() < 0.3:
            wanted[f"r{step}"] = rng.randint(1, 20)
            service = rng.choice((BATCH, DEFAULT_SERVICE))
            clock_.arrive(f"r{step}", service, rng.randint(1, 60), wanted[f"r{step}"])
        ran = clock_.run()
        if clock_.plan is not None and ran:
            assert len({sequence.online for sequence in clock_.plan.sequences()}) == 1
        if step >= 150 and not clock_.state.sequences:
            break
    assert {name: len(tokens) for name, tokens in clock_.tokens.items()} == wanted
