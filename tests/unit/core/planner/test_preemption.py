"""Batch work that is interrupted between layers produces the same tokens."""

import random
from dataclasses import replace
from math import inf

import pytest

from services.core.cost.model import CostModel
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.block_ledger import Follower
from services.core.planner.budget import Budget
from services.core.planner.configuration_events import (
    BlocksRelocated,
    ConfigurationEnded,
    FlightDiscarded,
    SequenceHeld,
    SequencePreempted,
    SequenceResumed,
    StagesConfigured,
)
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    IterationSuspended,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.preemption import OnlineRequest, Preempt, PreemptedWork, should_preempt
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Request
from services.core.service import Service, ServiceClass
from tests.unit.core.planner.test_state import FakeModel, expected, make_request, make_state

BATCH_WORK = Service(ServiceClass.BATCH)
COST = CostModel(alpha=0.0, beta=0.01, gamma=0.0, lam=0.0)
LONG = Batch((Chunk("b", 0, (1,) * 100, (0,), None),))


def offline(name: str, prompt: int, output: int, rng: random.Random) -> Request:
    return replace(make_request(name, prompt, output, rng), service=BATCH_WORK)


def make(**changes: object) -> PlannerState:
    return make_state(**{"preempt": Preempt.ALWAYS, **changes})


def suspended(state: PlannerState) -> Microbatch:
    """A suspended microbatch of two batch requests."""
    rng = random.Random(0)
    for name in ("b0", "b1"):
        state.handle(RequestArrived(0.0, offline(name, 6, 4, rng)))
    microbatch = state.plan(0.0)
    assert microbatch is not None and microbatch.preemptible
    state.handle(IterationSuspended(0.0))
    state.check_invariants()
    return microbatch


@pytest.mark.parametrize(
    ("policy", "slacks", "elapsed_s", "answer"),
    [
        (Preempt.OFF, [0.0], 0.0, False),
        (Preempt.ALWAYS, [], 0.0, False),
        (Preempt.ALWAYS, [inf], 0.0, True),
        (Preempt.DEADLINE, [inf], 0.0, False),
        (Preempt.DEADLINE, [1.2], 0.0, False),  # 1 s is left of it, the request takes 0.1 s
        (Preempt.DEADLINE, [1.2, 1.05], 0.0, True),
        (Preempt.DEADLINE, [0.3], 0.5, True),
        (Preempt.DEADLINE, [0.3], 0.9, False),
        (Preempt.DEADLINE, [0.05], 9.0, True),
    ],
)
def test_preemption_verdict_by_deadline(
    policy: Preempt, slacks: list[float], elapsed_s: float, answer: bool
) -> None:
    waiting = [OnlineRequest(10, slack_s) for slack_s in slacks]
    assert should_preempt(policy, LONG, elapsed_s, waiting, COST) is answer


def test_predicted_times_are_corrected_by_overruns() -> None:
    """The iteration takes 2 s, the request 0.2 s."""
    budget = Budget(mixed_scale=2.0)
    for slack_s, uncorrected, corrected in ((1.05, True, True), (2.1, False, True)):
        waiting = [OnlineRequest(10, slack_s)]
        assert should_preempt(Preempt.DEADLINE, LONG, 0.0, waiting, COST) is uncorrected
        assert should_preempt(Preempt.DEADLINE, LONG, 0.0, waiting, COST, budget) is corrected
    assert not should_preempt(Preempt.DEADLINE, LONG, 0.0, [OnlineRequest(10, 2.3)], COST, budget)


@pytest.mark.parametrize(
    ("scheduling", "answer"), [(Scheduling.SLO, True), (Scheduling.CONSERVE, False)]
)
def test_predictions_follow_measured_iteration_times(scheduling: Scheduling, answer: bool) -> None:
    """Each takes three times as long as the model says; `conserve` believes the model."""
    state = make(
        preempt=Preempt.DEADLINE,
        scheduling=scheduling,
        cost_model=COST,
        num_blocks=100,
        max_batch_tokens=64,
    )
    rng, now_s = random.Random(0), 0.0
    for number in range(41):
        state.handle(RequestArrived(now_s, offline(f"b{number}", 60, 1, rng)))
        microbatch = state.plan(now_s)
        assert microbatch is not None and microbatch.preemptible
        if number < 40:
            now_s += 3 * COST.batch_s([(0, 60)])
            state.handle(IterationFinished(now_s, {f"b{number}": 1}))
    assert state.should_preempt(microbatch.batch, 0.0, [OnlineRequest(10, 1.0)]) is answer


def test_a_slow_iteration_yields_in_time_once_polled_again() -> None:
    """Predicted: 1 s; the request takes 0.1 s, and had 1.5 s when the iteration started."""
    answers = {}
    for elapsed_s in (0.0, 0.5, 1.0, 1.25, 1.35):
        waiting = [OnlineRequest(10, 1.5 - elapsed_s)]
        answers[elapsed_s] = should_preempt(Preempt.DEADLINE, LONG, elapsed_s, waiting, COST)
    assert answers == {0.0: False, 0.5: False, 1.0: False, 1.25: False, 1.35: True}


def test_without_a_cost_model_a_deadline_is_kept() -> None:
    assert should_preempt(Preempt.DEADLINE, LONG, 0.0, [OnlineRequest(1, 100.0)], None)
    assert not should_preempt(Preempt.DEADLINE, LONG, 0.0, [OnlineRequest(1, inf)], None)


def test_slack_counts_the_time_at_the_gateway() -> None:
    rng = random.Random(0)
    request = replace(
        make_request("r", 5, 1, rng), service=Service(ttft_s=2.0), arrival_s=10.0, waited_s=0.5
    )
    assert OnlineRequest.of(request, 11.0) == OnlineRequest(5, 0.5)
    assert OnlineRequest.of(replace(request, service=Service()), 11.0).slack_s == inf


def test_only_pure_batch_work_is_preemptible() -> None:
    rng = random.Random(0)
    for policy in Preempt:
        state = make(preempt=policy)
        state.handle(RequestArrived(0.0, offline("b", 4, 2, rng)))
        alone = state.plan(0.0)
        assert alone is not None and alone.preemptible == (policy is not Preempt.OFF)
        state.handle(IterationDropped(0.0))
        state.handle(RequestArrived(0.0, make_request("o", 4, 2, rng)))
        mixed = state.plan(0.0)
        assert mixed is not None and len(mixed.batch.chunks) == 2 and not mixed.preemptible


def test_a_suspended_iteration_resumes_once_no_online_request_can_run() -> None:
    state = make()
    first = suspended(state)
    assert state.load().running == 2
    state.handle(RequestArrived(0.0, make_request("o", 3, 1, random.Random(1))))
    online = state.plan(0.0)
    assert online is not None and [chunk.seq_id for chunk in online.batch.chunks] == ["o"]
    state.handle(IterationFinished(0.0, {"o": 1}))
    again = state.plan(0.0)
    assert again is not None and (again.resumes, again.batch) == (first.number, first.batch)
    assert again.number == 3 and again.preemptible
    state.handle(IterationSuspended(0.0))
    last = state.plan(0.0)
    assert last is not None and (last.resumes, last.number) == (3, 4)
    state.handle(IterationFinished(0.0, {"b0": 1, "b1": 1}))
    state.check_invariants()
    assert (state.preempted_iterations_total, state.resumed_iterations_total) == (2, 2)
    assert state.sequence_table.discarded_tokens_total == 0


def test_a_suspended_iteration_resumes_if_online_requests_have_no_room() -> None:
    state = make(num_blocks=6)
    first = suspended(state)
    state.handle(RequestArrived(0.0, make_request("o", 20, 1, random.Random(1))))
    again = state.plan(0.0)
    assert again is not None and again.resumes == first.number


def test_a_starting_request_takes_places_and_blocks_of_a_suspended_iteration() -> None:
    """By priority, batch work yields to it, also while it is suspended."""
    for bounds in ({"num_blocks": 6}, {"max_running": 2}):
        state = make(scheduling=Scheduling.PRIORITY, **bounds)
        suspended(state)
        state.handle(RequestArrived(0.0, make_request("o", 20, 1, random.Random(1))))
        online = state.plan(0.0)
        assert online is not None and online.batch.chunks[0].seq_id == "o"
        assert state.sequence_table.suspended is None
        state.check_invariants()


@pytest.mark.parametrize(
    "event",
    [
        RequestAborted(0.0, "b1"),
        SequencePreempted("b0"),
        SequenceHeld("b0"),
        FlightDiscarded(),
        BlocksRelocated(16, 16),
    ],
    ids=lambda event: type(event).__name__,
)
def test_changes_to_its_blocks_or_sequences_end_a_suspended_iteration(event: object) -> None:
    state = make()
    tokens = suspended(state).batch.tokens
    state.handle(event)  # type: ignore[arg-type]
    state.check_invariants()
    assert state.sequence_table.suspended is None
    assert state.sequence_table.discarded_tokens_total == tokens
    assert all(not sequence.computed for sequence in state.sequences.values())


def test_an_abort_of_another_request_keeps_a_suspended_iteration() -> None:
    state = make()
    suspended(state)
    state.handle(RequestArrived(0.0, make_request("o", 3, 1, random.Random(1))))
    state.handle(RequestAborted(0.0, "o"))
    state.handle(RequestAborted(0.0, "unknown"))
    assert state.sequence_table.suspended is not None


def test_a_change_of_groups_ends_a_suspended_iteration() -> None:
    state = make()
    suspended(state)
    state.handle(ConfigurationEnded())
    state.handle(StagesConfigured(()))
    again = state.plan(0.0)
    assert again is not None and again.resumes is None and len(again.batch.chunks) == 2
    state.check_invariants()


@pytest.mark.parametrize("scheduling", [Scheduling.PRIORITY, Scheduling.SLO])
def test_no_batch_prompt_joins_the_interrupting_request(scheduling: Scheduling) -> None:
    """Otherwise it would wait for the rest of an iteration of the same length."""
    state = make(scheduling=scheduling, max_batch_tokens=64, num_blocks=64)
    suspended(state)
    rng = random.Random(3)
    state.handle(RequestArrived(0.0, offline("b2", 20, 2, rng)))
    state.handle(RequestArrived(0.0, make_request("o", 3, 3, rng)))
    first = state.plan(0.0)
    assert first is not None and [chunk.seq_id for chunk in first.batch.chunks] == ["o"]
    state.handle(IterationFinished(0.0, {"o": 1}))
    second = state.plan(0.0)
    assert second is not None and [chunk.seq_id for chunk in second.batch.chunks] == ["o", "b2"]
    state.check_invariants()


def test_a_merge_ends_a_suspended_iteration() -> None:
    """Its tokens are discarded, and the pipeline runs them from the start."""
    state = make()
    tokens = suspended(state).batch.tokens
    state.handle(ConfigurationEnded())
    state.handle(StagesConfigured((Follower(state.config.num_blocks),)))
    microbatch = state.plan(0.0)
    assert microbatch is not None and len(microbatch.batch.chunks) == 2
    assert (microbatch.preemptible, microbatch.resumes) == (False, None)
    assert all(chunk.start == 0 for chunk in microbatch.batch.chunks)
    state.check_invariants()
    load = state.load()
    assert load.discarded_tokens_total == tokens
    assert (load.preempted_iterations_total, load.resumed_iterations_total) == (1, 0)


def test_a_growing_request_takes_blocks_of_a_suspended_iteration() -> None:
    """Six blocks: four are suspended with batch work, the online request grows to five."""
    rng = random.Random(2)
    state = make(num_blocks=6)
    model, outputs = FakeModel(state.config), {}
    suspended(state)
    state.handle(RequestArrived(0.0, request := make_request("o", 4, 14, rng)))
    while "o" in state.sequences:
        microbatch = state.plan(0.0)
        assert microbatch is not None
        for command in state.handle(IterationFinished(0.0, model.run(microbatch.batch))):
            assert isinstance(command, EmitToken)
            outputs.setdefault(command.request_id, []).append(command.token_id)
        state.check_invariants()
    assert outputs["o"] == expected(request)[0]
    assert state.sequence_table.discarded_tokens_total == 12


class LayeredModel(FakeModel):
    """Writes the stand-in for K/V when a microbatch starts, and reads it when it ends."""

    def begin(self, batch: Batch) -> None:
        chunks = tuple(chunk._replace(sample=None) for chunk in batch.chunks)
        super().run(replace(batch, chunks=chunks))

    def end(self, batch: Batch) -> dict[str, int]:
        written = dict(self.slots)
        sampled = super().run(batch)
        assert self.slots == written, "another sequence has written to its blocks meanwhile"
        return sampled


@pytest.mark.parametrize("work", PreemptedWork)
@pytest.mark.parametrize("seed", range(60))
def test_output_does_not_depend_on_interruptions(seed: int, work: PreemptedWork) -> None:
    """Random arrivals, aborts, preemptions, holds and moves of blocks beside suspended work."""
    rng = random.Random(seed)
    caching, scheduling = rng.random() < 0.5, rng.choice(list(Scheduling))
    state = make(
        num_blocks=rng.choice([10, 16, 30]),
        preempted_work=work,
        prefix_caching=caching,
        scheduling=scheduling,
    )
    model, outputs = LayeredModel(state.config), {}
    arriving = [
        rng.choice((offline, offline, make_request))(
            f"r{n}", rng.randint(1, 20), rng.randint(1, 16), rng
        )
        for n in range(25)
    ]
    requests, aborted = list(arriving), set()
    while arriving or state.sequences:
        if arriving and (rng.random() < 0.3 or not state.sequences):
            state.handle(RequestArrived(0.0, arriving.pop()))
        _disturb(state, rng, aborted)
        state.check_invariants()
        microbatch = state.plan(0.0)
        state.check_invariants()
        if microbatch is None:
            continue
        if microbatch.resumes is None:
            model.begin(microbatch.batch)
        if microbatch.preemptible and rng.random() < 0.4:
            resumes = work is PreemptedWork.RESUME
            state.handle(IterationSuspended(0.0) if resumes else IterationDropped(0.0))
            continue
        for command in state.handle(IterationFinished(0.0, model.end(microbatch.batch))):
            assert isinstance(command, EmitToken)
            outputs.setdefault(command.request_id, []).append(command.token_id)
        state.check_invariants()
    for request in requests:
        if request.request_id not in aborted:
            assert outputs[request.request_id] == expected(request)[0]
    assert state.load().kv_blocks_free == state.config.num_blocks
    if work is PreemptedWork.DISCARD:
        assert state.resumed_iterations_total == 0


def _disturb(state: PlannerState, rng: random.Random, aborted: set[str]) -> None:
    for sequence in state.held[:]:
        state.handle(SequenceResumed(sequence.seq_id))
    if not state.sequences or rng.random() < 0.8:
        return
    name = rng.choice(list(state.sequences))
    match rng.randrange(4):
        case 0:
            aborted.add(name)
            state.handle(RequestAborted(0.0, name))
        case 1:
            state.handle(SequencePreempted(name))
        case 2:
            state.handle(SequenceHeld(name))
        case 3:
            state.handle(ConfigurationEnded())
            state.handle(StagesConfigured(()))


def test_interruptions_are_counted_in_metrics() -> None:
    state = make()
    suspended(state)
    load = state.load()
    assert (load.preempted_iterations_total, load.resumed_iterations_total) == (1, 0)
    assert state.plan(0.0) is not None
    load = state.load()
    assert (load.resumed_iterations_total, load.discarded_tokens_total) == (1, 0)


@pytest.mark.parametrize(("service", "interrupted"), [(BATCH_WORK, 1), (Service(), 0)])
def test_discarded_batch_work_counts_as_interrupted(service: Service, interrupted: int) -> None:
    """An iteration with online work is dropped only when one of its requests is aborted."""
    state = make(preempted_work=PreemptedWork.DISCARD)
    request = replace(make_request("r", 6, 4, random.Random(0)), service=service)
    state.handle(RequestArrived(0.0, request))
    assert state.plan(0.0) is not None
    state.handle(IterationDropped(0.0))
    load = state.load()
    assert (load.preempted_iterations_total, load.resumed_iterations_total) == (interrupted, 0)
    assert load.discarded_tokens_total == 6
