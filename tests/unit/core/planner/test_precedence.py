"""Order of waiting sequences and of preemption victims, by `scheduling`."""

import random

import pytest

from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import (
    BatchYielded,
    ConfigurationEnded,
    PoolLimited,
    SequenceAdopted,
    SequencePlaced,
    SequenceResumed,
)
from services.core.planner.events import IterationFinished, RequestArrived
from services.core.planner.sequence import Phase, SequenceState
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass

BATCH = Service(ServiceClass.BATCH)
INTERACTIVE = Service(ServiceClass.INTERACTIVE)


def planner(
    blocks: int, running: int, scheduling: Scheduling = Scheduling.PRIORITY, **changes: bool
) -> PlannerState:
    return PlannerState(
        IterationConfig(4, blocks, 32, running, 100, scheduling=scheduling, **changes)
    )


def arrive(
    state: PlannerState,
    name: str,
    service: Service,
    prompt: int = 4,
    output: int = 8,
    arrival_s: float | None = None,
) -> None:
    now_s = float(len(state.sequences)) if arrival_s is None else arrival_s
    prompt_ids = tuple(sum(map(ord, name)) + place for place in range(prompt))
    request = Request(name, prompt_ids, Sampling(), Limits(output), now_s, service=service)
    state.handle(RequestArrived(now_s, request))
    state.check_invariants()


def run(state: PlannerState) -> list[str]:
    """Plan and finish an iteration; returns the requests that ran in it."""
    microbatch = state.plan(9.0)
    assert microbatch is not None
    state.check_invariants()
    chunks = microbatch.batch.chunks
    sampled = {chunk.seq_id: 6 for chunk in chunks if chunk.sample is not None}
    state.handle(IterationFinished(9.0, sampled))
    state.check_invariants()
    return [chunk.seq_id for chunk in chunks]


def names(state: PlannerState) -> list[str]:
    return [sequence.seq_id for sequence in state.waiting]


@pytest.mark.parametrize(
    ("scheduling", "order"),
    [
        (Scheduling.FCFS, ["b1", "s2", "i3", "b4", "i5", "s6"]),
        (Scheduling.PRIORITY, ["i5", "i3", "s2", "s6", "b1", "b4"]),
        # By deadline: a client's rank does not delay other tenants' requests.
        *[
            (scheduling, ["s2", "i3", "i5", "s6", "b1", "b4"])
            for scheduling in (Scheduling.SLO, Scheduling.CONSERVE, Scheduling.BROS)
        ],
    ],
)
def test_requests_wait_by_arrival_or_by_class_and_rank(
    scheduling: Scheduling, order: list[str]
) -> None:
    state = planner(64, 1, scheduling)
    arrive(state, "b1", BATCH)
    arrive(state, "s2", DEFAULT_SERVICE)
    arrive(state, "i3", INTERACTIVE)
    arrive(state, "b4", BATCH)
    arrive(state, "i5", Service(ServiceClass.INTERACTIVE, rank=-1))
    arrive(state, "s6", DEFAULT_SERVICE)
    assert names(state) == order
    assert run(state) == order[:1]


@pytest.mark.parametrize(
    ("scheduling", "victim"), [(Scheduling.FCFS, "online"), (Scheduling.PRIORITY, "batch")]
)
def test_a_batch_sequence_yields_blocks_before_a_newer_online_one(
    scheduling: Scheduling, victim: str
) -> None:
    state = planner(5, 4, scheduling)
    arrive(state, "batch", BATCH, prompt=7)
    arrive(state, "online", DEFAULT_SERVICE, prompt=7)
    while not state.preemptions_total:
        run(state)
    (waiting,) = state.waiting
    assert waiting.seq_id == victim


def test_an_online_request_takes_the_blocks_of_batch_sequences_at_once() -> None:
    state = planner(10, 8)
    for name in ("b1", "b2", "b3"):
        arrive(state, name, BATCH, prompt=8)
    assert run(state) == ["b1", "b2", "b3"]
    arrive(state, "online", INTERACTIVE, prompt=12)
    assert run(state) == ["b1", "b2", "online"], "of the newest no more than needed"
    assert names(state) == ["b3"]


def test_an_online_request_takes_the_place_of_a_batch_sequence() -> None:
    state = planner(64, 2)
    arrive(state, "b1", BATCH)
    arrive(state, "b2", BATCH)
    run(state)
    arrive(state, "online", INTERACTIVE)
    assert run(state) == ["b1", "online"]
    arrive(state, "standard", DEFAULT_SERVICE)
    assert run(state) == ["online", "standard"]
    arrive(state, "late", INTERACTIVE)
    assert run(state) == ["online", "standard"], "online sequences yield nothing to one another"


def test_yielded_work_resumes_from_unused_blocks() -> None:
    state = planner(10, 8, prefix_caching=True)
    arrive(state, "batch", BATCH, prompt=28)
    run(state)
    arrive(state, "online", INTERACTIVE, prompt=16, output=1)
    assert run(state) == ["online"]
    microbatch = state.plan(9.0)
    assert microbatch is not None
    (chunk,) = microbatch.batch.chunks
    assert (chunk.seq_id, chunk.start) == ("batch", 24), "4 blocks were needed, 3 were free"


def test_online_prompts_precede_started_batch_prompts() -> None:
    state = planner(64, 8)
    arrive(state, "batch", BATCH, prompt=60)
    assert run(state) == ["batch"]
    arrive(state, "online", INTERACTIVE, prompt=30)
    microbatch = state.plan(9.0)
    assert microbatch is not None
    tokens = {chunk.seq_id: len(chunk.token_ids) for chunk in microbatch.batch.chunks}
    assert tokens == {"online": 30, "batch": 2}


def test_no_batch_request_starts_while_an_online_request_waits() -> None:
    state = planner(10, 8)
    arrive(state, "running", INTERACTIVE, prompt=24)
    run(state)
    arrive(state, "long", INTERACTIVE, prompt=24)
    arrive(state, "short", BATCH, prompt=4)
    assert run(state) == ["running"]
    assert names(state) == ["long", "short"]


def test_yielding_batch_work_is_no_demand() -> None:
    loads = {}
    for scheduling in Scheduling:
        state = planner(10, 8, scheduling)
        arrive(state, "b1", BATCH, prompt=20)
        run(state)
        arrive(state, "b2", BATCH, prompt=24)
        loads[scheduling] = state.load()
    before, after = loads[Scheduling.FCFS], loads[Scheduling.PRIORITY]
    assert (before.kv_blocks_wanted, before.kv_blocks_yielding, before.waiting_demand) == (7, 0, 1)
    assert (after.kv_blocks_wanted, after.kv_blocks_yielding, after.waiting_demand) == (0, 5, 0)


def test_batch_work_yields_to_a_restore_and_does_not_move() -> None:
    state = planner(10, 8)
    arrive(state, "b1", BATCH, prompt=8)
    arrive(state, "online", DEFAULT_SERVICE, prompt=8)
    arrive(state, "b2", BATCH, prompt=8)
    run(state)
    state.handle(BatchYielded(0, 5))
    state.check_invariants()
    assert names(state) == ["b2"]
    state.handle(ConfigurationEnded())
    state.check_invariants()
    assert names(state) == ["b1", "b2"]
    assert state.sequences["online"].blocks and state.sequences["online"].phase is Phase.RUNNING


@pytest.mark.parametrize("seed", range(60))
def test_no_online_sequence_loses_blocks_before_batch_sequences(seed: int) -> None:
    rng = random.Random(seed)
    state = planner(rng.choice((8, 14, 30)), rng.choice((2, 5)), prefix_caching=rng.random() < 0.5)
    services = (BATCH, DEFAULT_SERVICE, INTERACTIVE)
    number = 0
    for _ in range(120):
        if len(state.sequences) < 12 and rng.random() < 0.5:
            number += 1
            prompt = rng.randint(1, 14)
            arrive(state, f"r{number}", rng.choice(services), prompt, rng.randint(1, 12), number)
        if not state.sequences:
            continue
        before = {
            name for name, sequence in state.sequences.items() if sequence.phase is Phase.RUNNING
        }
        waited = tuple(state.waiting)
        run(state)
        waited = tuple(sequence for sequence in waited if sequence.phase is Phase.WAITING)
        lost = {
            sequence.seq_id
            for sequence in state.waiting
            if sequence.seq_id in before and sequence.request.service.online
        }
        left = [sequence for sequence in state.running if not sequence.request.service.online]
        assert not (lost and left)
        started = [sequence for sequence in left if sequence.seq_id not in before]
        assert not (started and any(sequence.request.service.online for sequence in waited))


@pytest.mark.parametrize("scheduling", [Scheduling.PRIORITY, Scheduling.SLO])
def test_online_sequences_beyond_the_limit_wait_for_each_other(scheduling: Scheduling) -> None:
    """After a split a leader may have more than may start, once their KV is here."""
    state = planner(400, 4, scheduling)
    held = [f"m{number}" for number in range(5)]
    for number, name in enumerate(held):
        prompt = tuple(range(8))
        request = Request(name, prompt, Sampling(), Limits(5), 0.0, service=INTERACTIVE)
        moved = SequenceState(request, (1,), 8, 3, 0.0, number)
        state.handle(SequenceAdopted(moved, frozenset({0}), True))
    for number in range(3):
        arrive(state, f"b{number}", BATCH, output=30)
    assert run(state) == ["b0", "b1", "b2"]
    for name in held:
        state.handle(SequencePlaced(name, 0))
        state.handle(SequenceResumed(name))
    arrive(state, "new", INTERACTIVE)
    ran = [run(state) for _ in range(8)]
    assert "new" not in ran[0] and any("new" in names for names in ran)


@pytest.mark.parametrize("scheduling", [Scheduling.PRIORITY, Scheduling.SLO])
def test_blocks_beyond_the_pool_limit_are_not_available(scheduling: Scheduling) -> None:
    state = planner(20, 8, scheduling)
    for number in range(6):
        arrive(state, f"b{number}", BATCH, output=20)
    for _ in range(7):
        run(state)
    state.handle(PoolLimited(10))
    arrive(state, "new", INTERACTIVE, prompt=40, output=4)
    assert "new" not in run(state), "it needs one block more than there are below the limit"
