"""Tail blocks that an online and a batch sequence share (`block_sharing`)."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from services.core.planner.config import IterationConfig
from services.core.planner.events import RequestArrived
from services.core.planner.preemption import PreemptedWork
from services.core.planner.shared_tails import SharedTails
from services.core.queue_order import Scheduling
from services.core.request import Limits
from services.core.service import DEFAULT_SERVICE
from tests.unit.core.planner.test_state import expected
from tests.unit.core.planner.test_suspended_work import BATCH, MODEL, Device, online

SCHEDULINGS = [Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS]


def _device(seed: int = 0, **changes: Any) -> Device:
    return Device(random.Random(seed), **({"block_sharing": True} | changes))


def _begin_batch(device: Device, prompt: int = 9, output: int = 11) -> str:
    """A batch request that decodes beside online ones; its tail has an entry after 8 tokens."""
    name = device.arrive(BATCH, prompt, output)
    device.run()
    return name


def test_an_online_request_without_a_free_block_takes_half_of_a_tail() -> None:
    device = _device(num_blocks=5)
    batch = _begin_batch(device)
    other = device.arrive(DEFAULT_SERVICE, 8, 6)
    device.run()
    microbatch = device.plan()
    assert microbatch is not None
    state = device.state
    assert state.preemptions_total == 0
    assert state.table.block_ids(other)[-1] == state.table.block_ids(batch)[-1]
    assert microbatch.batch.shared == {other}
    (turn,) = microbatch.turns
    assert turn.block == state.table.block_ids(other)[-1]


def test_the_blocks_beside_a_shared_tail_count_as_taken() -> None:
    """The rate of saves to host memory follows them."""
    device = _device(num_blocks=5)
    _begin_batch(device)
    other = device.arrive(DEFAULT_SERVICE, 9, 3)
    device.run()
    table = device.state.sequence_table
    assert device.state.sequences[other].blocks == 3 and table.tails.shared_total == 1
    assert (table.blocks_taken_total, table.online_blocks_taken_total) == (5, 2)


def test_without_the_switch_the_batch_request_loses_all_blocks() -> None:
    device = _device(num_blocks=5, block_sharing=False)
    _begin_batch(device)
    device.arrive(DEFAULT_SERVICE, 8, 6)
    device.run()
    device.run()
    assert device.state.preemptions_total == 1


def test_a_tail_is_lost_when_the_fills_meet() -> None:
    device = _device(num_blocks=5)
    batch = _begin_batch(device)
    device.arrive(DEFAULT_SERVICE, 8, 5)
    tails = device.state.sequence_table.tails
    while not tails.lost_tokens_total:
        device.run()
    sequence = device.state.sequences[batch]
    assert (sequence.blocks, sequence.computed) == (2, 8) and tails.shared_total == 1
    load = device.state.load()
    assert load.shared_tails_total == 1 and load.lost_tail_tokens_total == tails.lost_tokens_total
    while device.state.sequences:
        device.run()
    assert device.outputs[batch] == expected(device.requests[batch])[0]
    assert device.state.preemptions_total == 0


def test_the_tokens_of_a_tail_that_was_the_only_block_count_as_lost() -> None:
    device = _device(num_blocks=3)
    batch = _begin_batch(device, prompt=1, output=6)
    device.arrive(DEFAULT_SERVICE, 8, 4)
    tails, computed = device.state.sequence_table.tails, 0
    while not device.state.preemptions_total:
        computed = device.state.sequences[batch].computed
        device.run()
    assert tails.shared_total == 1 and tails.lost_tokens_total == computed > 0


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
def test_a_free_block_goes_to_online_requests_before_a_lost_tail(scheduling: Scheduling) -> None:
    device = _device(num_blocks=8, scheduling=scheduling)
    batch = _begin_batch(device)
    device.arrive(DEFAULT_SERVICE, 8, 9)  # takes half of the tail, then the tail
    growing = device.arrive(DEFAULT_SERVICE, 6, 9)
    device.arrive(DEFAULT_SERVICE, 1, 3)
    state = device.state
    for _ in range(3):  # the third request ends, and frees the only block when `growing` needs it
        device.run()
    assert state.sequence_table.tails.lost_tokens_total and state.sequence_table.ledger.free == 1
    device.run()
    assert state.sequences[growing].blocks == 3
    assert state.sequences[batch].blocks == 2 and not state.preemptions_total


def test_a_batch_request_that_yields_its_slot_has_no_tail_to_share() -> None:
    """Its other blocks stay in use, so the online request waits instead."""
    device = _device(num_blocks=8, prefix_caching=True, max_running=2)
    first = device.arrive(DEFAULT_SERVICE, 8, 12)
    device.run()
    batch = _begin_batch_like(device, first)
    free = device.state.sequence_table.ledger.free
    tails = device.state.sequence_table.tails
    assert tails.most_room(device.state.running) and len(device.state.running) == 2
    waiting = device.arrive(DEFAULT_SERVICE, 4 * free + 1, 8)
    device.run()
    assert not device.state.sequences[waiting].blocks and device.state.sequences[batch].blocks
    while device.state.sequences:
        device.run()
    for name, request in device.requests.items():
        assert device.outputs[name] == expected(request)[0]


def _begin_batch_like(device: Device, first: str) -> str:
    """A batch request that shares the blocks of a running request's prompt."""
    name, known = f"r{len(device.requests)}", device.requests[first]
    request = replace(
        known,
        request_id=name,
        prompt_ids=(*known.prompt_ids, 1),
        limits=Limits(6),
        service=BATCH,
        arrival_s=device.now_s,
    )
    device.requests[name] = request
    device.state.handle(RequestArrived(device.now_s, request))
    for _ in range(2):
        device.run()
    return name


def test_the_switch_needs_deadlines() -> None:
    for scheduling in Scheduling:
        if scheduling in SCHEDULINGS:
            IterationConfig(scheduling=scheduling, block_sharing=True)
        else:
            with pytest.raises(ValueError, match="slo, conserve or bros"):
                IterationConfig(scheduling=scheduling, block_sharing=True)


def _mixed_load(seed: int, scheduling: Scheduling, work: PreemptedWork) -> Device:
    """Run random arrivals, interruptions, aborts and demands for blocks to the end."""
    rng = random.Random(seed)
    size = rng.choice((4, 8, 16))
    device = _device(
        seed,
        block_size=size,
        num_blocks=rng.choice((160, 320)) // size,
        max_batch_tokens=rng.choice((16, 64)),
        max_running=16,
        prefix_caching=rng.random() < 0.5,
        harvest=rng.choice((0.5, 1.0)),
        cost_model=None if rng.random() < 0.2 else MODEL,
        preempted_work=work,
        scheduling=scheduling,
    )
    state, aborted = device.state, set()
    interrupted, arrivals = rng.choice((0.02, 0.3)), rng.choice((0.1, 0.3, 0.6))
    for _ in range(20):  # they fill the memory, and wait for more
        device.arrive(BATCH, rng.randint(4, 30), rng.randint(20, 60))
    for step in range(6000):
        busy = step < 160
        if not busy and not state.sequences:
            break
        if busy and rng.random() < arrivals:
            _arrive(device)
        elif rng.random() < 0.02:
            device.disturb(aborted, aborts=0.9)
        device.step(interrupted)
    device.check_end(aborted)
    return device


def _arrive(device: Device) -> None:
    rng = device.rng
    targets = rng.choice((None, 0.5)), rng.choice((None, 0.05, 0.2))
    device.arrive(online(*targets), rng.randint(1, 20), rng.randint(4, 40))


@pytest.mark.parametrize("scheduling", SCHEDULINGS)
@pytest.mark.parametrize("work", PreemptedWork)
@pytest.mark.parametrize("seed", range(12))
def test_random_mixed_loads_preserve_tokens(
    seed: int, work: PreemptedWork, scheduling: Scheduling
) -> None:
    _mixed_load(seed, scheduling, work)


def test_mixed_loads_share_and_lose_tails() -> None:
    tails = [
        _mixed_load(seed, Scheduling.SLO, PreemptedWork.RESUME).state.sequence_table.tails
        for seed in range(8)
    ]
    assert sum(each.shared_total for each in tails) > 20
    assert sum(each.lost_tokens_total for each in tails) > 20


def _never_colliding(_tails: SharedTails, _plan: object) -> list[object]:
    return []


def _turning_nothing(_tails: SharedTails) -> tuple[()]:
    return ()


@pytest.mark.parametrize(
    ("rule", "broken"), [("colliding", _never_colliding), ("take_turns", _turning_nothing)]
)
def test_a_slot_overwritten_too_early_is_detected(
    monkeypatch: pytest.MonkeyPatch, rule: str, broken: Callable[..., object]
) -> None:
    monkeypatch.setattr(SharedTails, rule, broken)
    monkeypatch.setattr(SharedTails, "check_invariants", lambda _: None)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(6):
            _mixed_load(seed, Scheduling.SLO, PreemptedWork.RESUME)
