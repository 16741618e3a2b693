"""Packing with deadlines: turns of batch work, adaptive slots, victims by slack."""

from itertools import pairwise

import pytest

from services.core.planner.packing import AdaptiveSlots
from services.core.planner.plan import Plan
from services.core.planner.victims import VictimRule
from tests.unit.core.planner.test_slo import BATCH, Clock, planner, promised


def _beside(packing: bool, tpot_s: float = 0.2) -> Clock:
    """Online decodes that leave a batch decode no time: one is due at once, nine are not."""
    clock = Clock(planner(packing=packing, harvest=1.0))
    clock.begin("filler", BATCH, output=60)
    clock.arrive("tight", promised(tpot_s=0.022), output=60)
    for number in range(9):
        clock.arrive(f"r{number}", promised(tpot_s=tpot_s), output=60)
    clock.run()
    return clock


def _shares(clock: Clock, iterations: int = 20) -> dict[str, int]:
    ran = [clock.run() for _ in range(iterations)]
    return {name: sum(name in tokens for tokens in ran) for name in clock.tokens}


def test_a_batch_decode_takes_the_turn_of_a_decode_with_slack() -> None:
    without = _shares(_beside(packing=False))
    clock = _beside(packing=True)
    packed = _shares(clock)
    assert packed["filler"] > without["filler"]
    assert packed["tight"] == without["tight"] == 20, "it can spare nothing"
    for name in clock.tokens.keys() - {"filler"}:
        tokens = clock.tokens[name]
        gaps = [b - a for a, b in pairwise(tokens[1:])]
        assert max(gaps) <= (0.0221 if name == "tight" else 0.2), name


def test_no_decode_yields_its_turn_without_slack() -> None:
    assert _shares(_beside(packing=True, tpot_s=0.024)) == _shares(
        _beside(packing=False, tpot_s=0.024)
    )


def test_a_request_without_targets_keeps_its_turn() -> None:
    clock = Clock(planner(packing=True, harvest=1.0))
    clock.begin("filler", BATCH, output=60)
    clock.arrive("tight", promised(tpot_s=0.013), output=60)
    clock.begin("untargeted", promised(), output=60)
    ran = [clock.run() for _ in range(20)]
    assert all("untargeted" in tokens for tokens in ran)


def test_slots_double_until_a_deadline_binds_and_fall_back_to_their_base() -> None:
    slots = AdaptiveSlots(100)
    assert slots.limit == 50
    slots.observe(bound=False)
    assert slots.limit == 100, "no more than may run"
    slots.observe(bound=True)
    assert slots.limit == slots.base == 50
    assert AdaptiveSlots(1).limit == 1
    assert slots.left(Plan(1)) == 50


@pytest.mark.parametrize(("adaptive", "after"), [(True, 15), (False, 19)])
def test_slots_bound_what_joins_after_a_deadline_has_bound(adaptive: bool, after: int) -> None:
    clock = Clock(planner(adaptive_slots=adaptive, harvest=1.0, max_running=30))
    for number in range(18):
        clock.arrive(f"b{number}", BATCH, output=60)
    clock.run()
    for name in ("x", "y", "z"):
        clock.arrive(name, promised(tpot_s=0.0125), output=2)
    clock.run()
    assert (
        clock.run().keys() == {"x", "y", "z"}
        and clock.plan is not None
        and clock.plan.deadline_bound
    )
    clock.arrive("patient", promised(tpot_s=5.0), output=60)
    assert [len(clock.run()) for _ in range(2)] == [after, 19]


def test_batch_work_alone_has_no_slots() -> None:
    clock = Clock(planner(adaptive_slots=True, max_running=20))
    clock.arrive("late", promised(tpot_s=0.001), output=3)
    for number in range(15):
        clock.arrive(f"b{number}", BATCH, output=60)
    while "late" in clock.state.sequences:
        clock.run()
    clock.run()
    assert len(clock.run()) == 15


def _until_blocks_are_lost(clock: Clock) -> list[str]:
    """Run until a sequence has lost its blocks; returns the waiting sequences."""
    while not clock.state.preemptions_total:
        clock.run()
    return [sequence.seq_id for sequence in clock.state.waiting]


@pytest.mark.parametrize(("rule", "victim"), [("newest", "urgent"), ("slack", "patient")])
def test_the_victim_when_an_online_request_needs_a_block(rule: str, victim: str) -> None:
    clock = Clock(planner(num_blocks=10, victims=VictimRule(rule)))
    clock.arrive("oldest", promised(tpot_s=9.0), prompt=11, output=12)
    clock.arrive("patient", promised(tpot_s=1.0), prompt=11, output=12)
    clock.begin("urgent", promised(tpot_s=0.1), prompt=11, output=12)
    assert len(clock.state.running) == 3
    assert _until_blocks_are_lost(clock) == [victim], "the oldest one always advances"
    while clock.state.sequences:
        clock.run()
    assert all(len(tokens) == 12 for tokens in clock.tokens.values())


def test_batch_work_loses_its_blocks_before_online_requests() -> None:
    clock = Clock(planner(num_blocks=10, victims=VictimRule.SLACK))
    clock.arrive("oldest", promised(tpot_s=9.0), prompt=11, output=12)
    clock.arrive("patient", promised(tpot_s=1.0), prompt=11, output=12)
    clock.begin("batch", BATCH, prompt=11, output=12)
    assert len(clock.state.running) == 3
    assert _until_blocks_are_lost(clock) == ["batch"]
