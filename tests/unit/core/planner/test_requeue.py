"""Requests that wait at a worker without having started are returned; no others are."""

import random
from dataclasses import replace

import pytest

from services.core.cost.model import CostModel
from services.core.planner.configuration_events import (
    BlocksReleased,
    SequenceAdopted,
    SequenceHeld,
    SequencePreempted,
    SequenceReset,
    SequenceResumed,
)
from services.core.planner.events import (
    IterationFinished,
    RefuseRequest,
    RequestArrived,
    RequeueChecked,
)
from services.core.planner.requeue import REQUEUE_AFTER_S
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.service import Service, ServiceClass
from tests.unit.core.planner.test_state import (
    FakeModel,
    drive,
    expected,
    make_request,
    make_state,
)

LATER_S = REQUEUE_AFTER_S + 0.01


def arrive(state: PlannerState, name: str, prompt: int, now_s: float, **fields: object) -> None:
    request = replace(make_request(name, prompt, 4, random.Random(1)), **fields)
    assert state.handle(RequestArrived(now_s, request)) == []


def returned(state: PlannerState, now_s: float) -> list[str]:
    returned_ids = []
    for command in state.handle(RequeueChecked(now_s)):
        assert isinstance(command, RefuseRequest) and command.returned and command.retryable
        returned_ids.append(command.request_id)
    state.check_invariants()
    return returned_ids


def full() -> PlannerState:
    """A planner with one running request; no other prompt of more than a few tokens fits."""
    state = make_state(max_batch_tokens=64)
    arrive(state, "runs", 56, 0.0, returnable=True)
    state.plan(0.0)
    return state


def test_requests_that_wait_long_without_room_return_in_order() -> None:
    state = full()
    for name in ("first", "second"):
        arrive(state, name, 20, 1.0, returnable=True)
    arrive(state, "stays", 20, 1.0)
    arrive(state, "late", 20, 1.1, returnable=True)
    assert state.requeue_due_s == 1.0 + REQUEUE_AFTER_S
    assert returned(state, 1.1) == []
    assert returned(state, 1.0 + LATER_S) == ["first", "second"]
    assert state.requeue_due_s == 1.1 + REQUEUE_AFTER_S
    assert returned(state, 1.1 + LATER_S) == ["late"]
    assert list(state.sequences) == ["runs", "stays"] and state.requeue_due_s is None


def test_no_request_returns_while_another_can_start() -> None:
    state = full()
    arrive(state, "short", 2, 1.0, returnable=True)
    assert state.requeue_due_s is None


def test_a_started_request_stays_even_without_its_blocks() -> None:
    state = full()
    state.handle(IterationFinished(0.1, {"runs": 1}))
    state.handle(SequencePreempted("runs"))
    assert returned(state, 10.0) == []
    assert list(state.sequences) == ["runs"]


def test_an_adopted_request_stays() -> None:
    state, other = full(), make_state()
    arrive(other, "moved", 20, 1.0, returnable=True)
    assert state.handle(SequenceAdopted(other.export("moved"))) == []
    assert state.requeue_due_s is None and returned(state, 10.0) == []


@pytest.mark.parametrize("read", [False, True])
def test_a_held_request_returns_afterwards(read: bool) -> None:
    state = full()
    arrive(state, "held", 20, 1.0, returnable=True)
    state.handle(SequenceHeld("held"))
    if read:
        assert state.requeue_due_s is None
    assert returned(state, 10.0) == []
    arrive(state, "next", 20, 10.0)
    state.handle(SequenceResumed("held"))
    assert state.requeue_due_s == 1.0 + REQUEUE_AFTER_S
    assert returned(state, 10.0) == ["held"]


def test_a_request_with_tokens_stays_even_if_it_was_reset() -> None:
    state = full()
    state.handle(IterationFinished(0.1, {"runs": 1}))
    state.handle(SequenceReset("runs"))
    state.handle(BlocksReleased("runs"))
    state.handle(SequenceResumed("runs"))
    assert returned(state, 10.0) == []
    assert list(state.sequences) == ["runs"]


BATCH_WORK = Service(ServiceClass.BATCH)


def test_batch_work_without_time_returns_like_parked_work() -> None:
    """There is room for it, but the fill level admits none."""
    model = CostModel(alpha=0.0, beta=1e-3, gamma=0.0, lam=1e-3)
    state = make_state(
        scheduling=Scheduling.SLO, cost_model=model, harvest=0.0, shelf_max_s=5.0, num_blocks=64
    )
    service = Service(ServiceClass.INTERACTIVE, ttft_s=1.0, tpot_s=0.05)
    arrive(state, "runs", 8, 0.0, service=service)
    arrive(state, "b0", 8, 1.0, service=BATCH_WORK, returnable=True)
    arrive(state, "stays", 8, 1.0, service=BATCH_WORK)
    arrive(state, "b1", 8, 2.0, service=BATCH_WORK, returnable=True)
    microbatch = state.plan(2.0)
    assert microbatch is not None and len(microbatch.batch.chunks) == 1, "nothing else joins"
    assert state.requeue_due_s == 1.0 + 5.0
    assert returned(state, 1.0 + 5.0) == ["b0"]
    assert state.requeue_due_s == 2.0 + 5.0


def test_without_yielding_no_batch_work_returns_with_room() -> None:
    state = make_state(scheduling=Scheduling.FCFS, shelf_max_s=5.0, num_blocks=64)
    arrive(state, "b", 8, 1.0, service=BATCH_WORK, returnable=True)
    assert state.requeue_due_s is None and returned(state, 100.0) == []


@pytest.mark.parametrize("seed", range(20))
def test_under_load_every_request_runs_once_or_returns_without_a_token(seed: int) -> None:
    rng = random.Random(seed)
    state = make_state(num_blocks=rng.choice([10, 16]), max_batch_tokens=rng.choice([8, 16]))
    model, outputs, back = FakeModel(state.config), {}, set[str]()
    requests = [
        replace(
            make_request(f"r{number}", rng.randint(1, 20), rng.randint(1, 20), rng),
            returnable=rng.random() < 0.7,
        )
        for number in range(40)
    ]
    arriving, now_s = list(requests), 0.0

    def between(_: object) -> None:
        nonlocal now_s
        now_s += 0.05
        if arriving and rng.random() < 0.5:
            state.handle(RequestArrived(now_s, arriving.pop()))
        due_s = state.requeue_due_s
        if due_s is not None and due_s <= now_s:
            returned_ids = returned(state, now_s)
            assert (
                returned_ids
                and not back & set(returned_ids)
                and not outputs.keys() & set(returned_ids)
            )
            back.update(returned_ids)

    while arriving:
        state.handle(RequestArrived(now_s, arriving.pop()))
        drive(state, model, outputs, between)
    assert back | outputs.keys() == {request.request_id for request in requests}
    assert not back & outputs.keys() and back <= {r.request_id for r in requests if r.returnable}
    for request in requests:
        if request.request_id in outputs:
            tokens, reason = outputs[request.request_id]
            assert (tokens, reason[0]) == expected(request)
    assert state.pool.free_count == state.config.num_blocks
