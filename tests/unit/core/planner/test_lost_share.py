"""Requests that a leader keeps and returns after a loss has divided its group."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import GroupDivided
from services.core.planner.configuration_handlers import excess_lost_sequences
from services.core.planner.events import RefuseRequest, RequestArrived
from services.core.planner.sequence import Sequence
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass

CONFIG = IterationConfig(4, 64, max_batch_tokens=64, max_running=8, max_waiting=50)


def request(
    number: int, tokens: int = 8, *, resumable: bool = True, batch: bool = False
) -> Request:
    service = Service(ServiceClass.BATCH if batch else ServiceClass.STANDARD)
    prompt, limits = (5,) * tokens, Limits(4)
    made = Request(f"r{number:02}", prompt, Sampling(), limits, float(number), service=service)
    return replace(made, resumable=resumable)


def planner_with(requests: list[Request], config: IterationConfig = CONFIG) -> PlannerState:
    state = PlannerState(config)
    for request_ in requests:
        state.handle(RequestArrived(request_.arrival_s, request_))
    return state


def divided(state: PlannerState, members: int) -> list[str]:
    """The names of the sequences that the leader returns."""
    names = []
    for command in state.handle(GroupDivided(members)):
        assert isinstance(command, RefuseRequest)
        assert command.returned and command.retryable and command.kv_lost
        names.append(command.request_id)
    state.check_invariants()
    assert not names or not state.sequences.keys() & set(names)
    return names


@pytest.mark.parametrize(("members", "kept"), [(1, 9), (2, 5), (3, 3), (4, 3), (9, 1), (100, 1)])
def test_the_oldest_stay_for_a_share_of_the_tokens(members: int, kept: int) -> None:
    state = planner_with([request(number) for number in range(9)])
    assert divided(state, members) == [f"r{number:02}" for number in range(kept, 9)]


def test_long_requests_count_for_more() -> None:
    state = planner_with([request(0, 80), *(request(number) for number in range(1, 6))])
    assert divided(state, 3) == [f"r{number:02}" for number in range(1, 6)]


def test_non_resumable_requests_stay_and_count() -> None:
    state = planner_with([request(number, resumable=number < 4) for number in range(6)])
    assert divided(state, 3) == ["r00", "r01", "r02", "r03"]
    state = planner_with([request(number, resumable=number < 4) for number in range(6)])
    assert divided(state, 2) == ["r01", "r02", "r03"]


def test_requests_with_kv_stay() -> None:
    state = planner_with([request(number) for number in range(2)])
    assert state.plan(9.0) is not None
    for request_ in [request(number) for number in range(2, 8)]:
        state.handle(RequestArrived(request_.arrival_s, request_))
    assert divided(state, 3) == ["r04", "r05", "r06", "r07"]


@pytest.mark.parametrize(
    ("scheduling", "excess"),
    [(Scheduling.FCFS, ["r02", "r03", "r04", "r05"]), (Scheduling.PRIORITY, ["r02", "r04"])],
)
def test_yielding_batch_work_stays(scheduling: Scheduling, excess: list[str]) -> None:
    requests = [request(number, batch=number % 2 == 1) for number in range(6)]
    assert divided(planner_with(requests, replace(CONFIG, scheduling=scheduling)), 3) == excess


def test_sharing_lost_requests_can_be_disabled() -> None:
    requests = [request(number) for number in range(6)]
    state = planner_with(requests, replace(CONFIG, spread_after_loss=False))
    assert divided(state, 3) == []


@given(
    ones=st.lists(st.tuples(st.integers(1, 50), st.booleans()), max_size=20),
    members=st.integers(1, 6),
)
def test_a_share_is_kept_by_age_and_no_more_than_one_beyond_it(
    ones: list[tuple[int, bool]], members: int
) -> None:
    requests = [request(at, tokens, resumable=may) for at, (tokens, may) in enumerate(ones)]
    sequences = [
        Sequence(request, at + 1, request.arrival_s) for at, request in enumerate(requests)
    ]
    excess = excess_lost_sequences(reversed(sequences), members, batch_yields=False)
    kept = [sequence for sequence in sequences if sequence not in excess]
    total, left = (sum(len(sequence.token_ids) for sequence in some) for some in (sequences, kept))
    assert all(sequence.request.resumable for sequence in excess)
    movable = [sequence for sequence in kept if sequence.request.resumable]
    assert [*movable, *excess] == [sequence for sequence in sequences if sequence.request.resumable]
    assert not excess or left * members >= total
    if movable:
        assert (left - len(movable[-1].token_ids)) * members < total
