"""Reported load of a planner, by class."""

import random
from dataclasses import replace

from services.core.planner.configuration_events import SequenceAdopted, SequenceForgotten
from services.core.planner.events import IterationFinished, RequestAborted, RequestArrived
from services.core.planner.state import PlannerState
from services.core.report import Load
from services.core.service import Service, ServiceClass
from tests.unit.core.planner.test_state import FakeModel, drive, make_request, make_state

BATCH = Service(ServiceClass.BATCH)


def arrive(state: PlannerState, name: str, prompt: int, **fields: object) -> None:
    request = replace(make_request(name, prompt, 4, random.Random(1)), **fields)
    assert state.handle(RequestArrived(0.0, request)) == []


def of_batch(load: Load) -> tuple[int, int, int]:
    return load.batch_running, load.batch_waiting, load.kv_blocks_batch


def test_batch_requests_are_counted_separately() -> None:
    state = make_state(max_batch_tokens=64)
    arrive(state, "online", 8)
    assert of_batch(state.load()) == (0, 0, 0)
    arrive(state, "small", 8, service=BATCH)
    arrive(state, "large", 60, service=BATCH)
    assert of_batch(state.load()) == (0, 2, 0)
    state.plan(0.0)
    assert of_batch(state.load()) == (1, 1, 2)
    assert (state.load().running, state.load().waiting) == (2, 1)
    state.handle(RequestAborted(0.0, "large"))
    assert of_batch(state.load()) == (1, 0, 2)


def test_a_moved_request_counts_at_its_worker() -> None:
    state, other = make_state(), make_state()
    arrive(other, "moves", 20, service=BATCH)
    assert state.handle(SequenceAdopted(other.export("moves"))) == []
    other.handle(SequenceForgotten("moves"))
    assert of_batch(other.load()) == (0, 0, 0) and of_batch(state.load()) == (0, 1, 0)
    drive(state, FakeModel(state.config), {})
    assert of_batch(state.load()) == (0, 0, 0)


def test_a_sequence_that_comes_without_kv_frees_its_earlier_blocks_here() -> None:
    """This stage ran it for another leader, which has to restart it."""
    state, other = make_state(), make_state()
    arrive(other, "moves", 20, service=BATCH)
    state.table.adopt("moves", 5)
    state.handle(SequenceAdopted(other.export("moves")))
    assert state.pool.taken_count == 0
    drive(state, FakeModel(state.config), {})
    assert state.load().kv_blocks_free == state.config.num_blocks


def test_pending_prefill_tokens_are_reported() -> None:
    state = make_state(max_batch_tokens=32)
    arrive(state, "first", 20)
    arrive(state, "second", 30)
    assert state.load().prefill_tokens == 50
    state.plan(0.0)
    # The first waits for its token; of the second, 12 tokens run with it.
    assert state.load().prefill_tokens == 18
    state.handle(IterationFinished(0.0, {"first": 1}))
    state.plan(0.0)
    assert state.load().prefill_tokens == 0


def test_shared_blocks_count_once_and_only_if_batch_work_alone_has_them() -> None:
    state = make_state(max_batch_tokens=64, prefix_caching=True)
    prompt = tuple(range(1, 10))  # two full blocks and one token
    arrive(state, "one", 8, service=BATCH, prompt_ids=prompt)
    state.plan(0.0)
    state.handle(IterationFinished(0.0, {"one": 1}))
    arrive(state, "two", 8, service=BATCH, prompt_ids=prompt)
    state.plan(0.0)
    assert state.load().kv_blocks_batch == state.pool.taken_count == 4
    arrive(state, "three", 8, prompt_ids=prompt)
    state.handle(IterationFinished(0.0, {"one": 1, "two": 1}))
    state.plan(0.0)
    assert state.load().kv_blocks_batch == 2 and state.pool.taken_count == 5
