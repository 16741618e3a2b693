"""Fast-forwarding plain decodes reaches the state of iteration-by-iteration execution."""

import random

import pytest

from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, IterationFinished, RequestArrived
from services.core.planner.fast_forward import (
    advance_decodes,
    decodes_ahead,
    finish_filled,
    plan_shape,
)
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass

FILLER = -1
JUMPING = (Scheduling.FCFS, Scheduling.PREFILL_FIRST, Scheduling.PRIORITY, Scheduling.SLO)


def random_config(rng: random.Random, scheduling: Scheduling = Scheduling.FCFS) -> IterationConfig:
    max_running = rng.choice([1, 3, 8, 20])
    return IterationConfig(
        block_size=rng.choice([1, 4, 16]),
        num_blocks=rng.choice([12, 30, 80]),
        max_batch_tokens=max_running + rng.choice([0, 10, 60]),
        max_running=max_running,
        max_waiting=1000,
        prefix_caching=False,
        scheduling=scheduling,
    )


def random_request(rng: random.Random, number: int, config: IterationConfig) -> Request:
    capacity = config.num_blocks * config.block_size
    prompt = rng.randint(1, min(40, capacity // 3))
    output = rng.randint(1, min(80, capacity - prompt))
    return Request(
        f"r{number}", (0,) * prompt, Sampling(), Limits(output, stop_token_ids=frozenset({5})), 0.0
    )


def is_tight(config: IterationConfig) -> bool:
    """Whether so few tokens fit that hardly any request runs undisturbed."""
    return config.num_blocks * config.block_size < 200


def step(state: PlannerState) -> list[EmitToken] | None:
    """Run an iteration as a worker does; None if there is nothing to run."""
    microbatch = state.plan(0.0)
    if microbatch is None:
        return None
    chunks = microbatch.batch.chunks
    sampled = {chunk.seq_id: FILLER for chunk in chunks if chunk.sample is not None}
    return state.handle(IterationFinished(0.0, sampled))  # type: ignore[return-value]


def step_filled(state: PlannerState) -> list[EmitToken] | None:
    """Run an iteration as a simulator does."""
    return finish_filled(state, FILLER, 0.0) if plan_shape(state, 0.0) is not None else None


def picture(state: PlannerState) -> object:
    """All state that a later decision can depend on."""
    return (
        [(s.seq_id, s.phase, s.computed, s.token_ids, s.blocks) for s in state.sequences.values()],
        [s.seq_id for s in state.running],
        [s.seq_id for s in state.waiting],
        state.table.tables,
        state.pool._empty,
        state.load(),
        state.in_flight,
    )


@pytest.mark.parametrize("scheduling", JUMPING)
@pytest.mark.parametrize("seed", range(40))
def test_a_fast_forward_equals_its_steps(seed: int, scheduling: Scheduling) -> None:
    rng = random.Random(seed)
    config = random_config(rng, scheduling)
    stepping, jumping = PlannerState(config), PlannerState(config)
    number = jumps = 0
    for _ in range(150):
        for _ in range(rng.choice([0, 0, 0, 0, 1, 2])):
            number += 1
            arrived = RequestArrived(0.0, random_request(rng, number, config))
            assert stepping.handle(arrived) == jumping.handle(arrived)
        ahead = decodes_ahead(jumping)
        assert (decodes_ahead(jumping), picture(jumping)) == (ahead, picture(stepping))
        if ahead:
            count = rng.randint(1, ahead)
            before = {s.seq_id: s.output_count for s in jumping.running}
            advance_decodes(jumping, count, FILLER, 0.0)
            for done in range(count):
                assert step(stepping) == [
                    EmitToken(name, first + done, FILLER, None) for name, first in before.items()
                ]
            jumps += 1
        else:
            tokens = step(stepping)
            edges = [t for t in tokens or [] if t.index == 0 or t.finish_reason is not None]
            assert (step_filled(jumping) or []) == edges
        jumping.check_invariants()
        assert picture(jumping) == picture(stepping)
    assert jumps > 3 or is_tight(config)
    assert jumping.preemptions_total == stepping.preemptions_total


@pytest.mark.parametrize(
    "scheduling", [scheduling for scheduling in Scheduling if scheduling not in JUMPING]
)
def test_no_fast_forward_while_decodes_are_selected_each_iteration(scheduling: Scheduling) -> None:
    state = PlannerState(IterationConfig(4, 100, 8, 8, 10, scheduling=scheduling))
    state.handle(RequestArrived(0.0, Request("a", (0,) * 4, Sampling(), Limits(10), 0.0)))
    step(state)
    assert state.running and decodes_ahead(state) == 0


@pytest.mark.parametrize(
    ("service", "jumps"),
    [
        (Service(ttft_s=1.0), True),
        (Service(tpot_s=1.0), False),
        (Service(ServiceClass.BATCH), False),
    ],
)
def test_slo_fast_forwards_without_batch_requests_and_tpot_targets(
    service: Service, jumps: bool
) -> None:
    state = PlannerState(IterationConfig(4, 100, 64, 8, 10, scheduling=Scheduling.SLO))
    for name, kind in (("plain", Service()), ("other", service)):
        request = Request(name, (0,) * 4, Sampling(), Limits(10), 0.0, service=kind)
        state.handle(RequestArrived(0.0, request))
    step(state)
    assert len(state.running) == 2
    assert bool(decodes_ahead(state)) is jumps


@pytest.mark.parametrize("seed", range(30))
def test_a_fast_forward_ends_at_the_next_event(seed: int) -> None:
    rng = random.Random(seed)
    config = random_config(rng)
    state = PlannerState(config)
    ended = 0
    for number in range(12):
        state.handle(RequestArrived(0.0, random_request(rng, number, config)))
    for _ in range(400):
        ahead = decodes_ahead(state)
        if ahead == 0:
            if step(state) is None:
                break
            continue
        names, preempted = [s.seq_id for s in state.running], state.preemptions_total
        advance_decodes(state, ahead, FILLER, 0.0)
        tokens = step(state)
        assert tokens is not None
        happened = (
            any(token.finish_reason is not None for token in tokens)
            or state.preemptions_total > preempted
            or [s.seq_id for s in state.running] != names
        )
        assert happened, "more decodes could have been skipped"
        ended += 1
    assert ended > 2 or is_tight(config)
    assert not state.sequences and state.pool.free_count == config.num_blocks


def test_no_fast_forward_while_an_event_may_occur() -> None:
    config = IterationConfig(4, 100, 8, 8, 10)
    state = PlannerState(config)
    assert decodes_ahead(state) == 0, "no request runs"
    state.handle(RequestArrived(0.0, Request("a", (0,) * 20, Sampling(), Limits(10), 0.0)))
    assert decodes_ahead(state) == 0, "a request can start"
    assert plan_shape(state, 0.0) is not None
    assert decodes_ahead(state) == 0, "an iteration runs"
    assert finish_filled(state, FILLER, 0.0) == []
    assert decodes_ahead(state) == 0, "the prompt is incomplete"
    step(state)
    assert [t.index for t in step_filled(state) or []] == [0]
    assert decodes_ahead(state) == 8, "nine more tokens, the last of which ends it"
