"""`scheduling: round_robin`: iterations of online and of batch work alternate."""

import random

import pytest

from services.core.queue_order import Scheduling
from services.core.service import DEFAULT_SERVICE
from tests.unit.core.planner.test_slo import BATCH, Clock, planner


def clock(**changes: object) -> Clock:
    return Clock(planner(scheduling=Scheduling.ROUND_ROBIN, **changes))


def test_turns_alternate_while_both_have_work() -> None:
    one = clock()
    one.arrive("online", DEFAULT_SERVICE, prompt=300, output=3)
    one.arrive("batch", BATCH, prompt=300, output=3)
    turns = [one.run() for _ in range(9)]
    assert [list(ran) for ran in turns[:8]] == [["online"], ["batch"]] * 4
    assert turns[8] == {} and not one.state.sequences


def test_a_kind_without_work_leaves_its_turn() -> None:
    one = clock()
    one.arrive("batch", BATCH, output=6)
    assert [list(one.run()) for _ in range(2)] == [["batch"]] * 2
    one.arrive("online", DEFAULT_SERVICE, output=3)
    assert [list(one.run()) for _ in range(3)] == [["online"], ["batch"], ["online"]]


def test_a_request_without_room_is_not_overtaken_for_ever_by_the_other_kind() -> None:
    one = clock(num_blocks=24, max_running=8)
    one.begin("first", BATCH, prompt=40, output=8)
    one.arrive("large", DEFAULT_SERVICE, prompt=88, output=2)
    for number in range(400):
        one.begin(f"b{number}", BATCH, prompt=8, output=8)
        if "large" in one.tokens:
            break
    assert "large" in one.tokens


@pytest.mark.parametrize("seed", range(12))
def test_any_load_ends(seed: int) -> None:
    rng = random.Random(seed)
    one = clock(
        num_blocks=rng.choice((24, 60, 200)),
        max_running=rng.choice((2, 6, 32)),
        max_batch_tokens=rng.choice((32, 64)),
    )
    wanted: dict[str, int] = {}
    for step in range(3000):
        if step < 150 and rng.random() < 0.3:
            wanted[f"r{step}"] = rng.randint(1, 20)
            service = rng.choice((BATCH, DEFAULT_SERVICE))
            one.arrive(f"r{step}", service, rng.randint(1, 60), wanted[f"r{step}"])
        ran = one.run()
        if one.plan is not None and ran:
            assert len({sequence.online for sequence in one.plan.sequences()}) == 1
        if step >= 150 and not one.state.sequences:
            break
    assert {name: len(tokens) for name, tokens in one.tokens.items()} == wanted
