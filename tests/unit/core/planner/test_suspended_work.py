"""Batch work interrupted by online requests completes with its tokens, at any load."""

import random
from dataclasses import replace
from typing import Any

import pytest

from services.core.cost.model import CostModel
from services.core.planner.batch import Microbatch
from services.core.planner.configuration_events import BatchYielded
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    IterationSuspended,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.preemption import SUSPENDED_WAIT_FACTOR, Preempt, PreemptedWork
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling
from services.core.request import Request
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from tests.unit.core.planner.test_preemption import LayeredModel
from tests.unit.core.planner.test_state import expected, make_request, make_state

BATCH = Service(ServiceClass.BATCH)
MODEL = CostModel(alpha=0.0, beta=1e-4, gamma=0.011, lam=0.01)
"""10 ms an iteration, 1 ms a sequence, 0.1 ms a token."""


class Device:
    """Runs the planner's work in the time of `MODEL`, and checks all tokens."""

    def __init__(self, rng: random.Random, **changes: Any) -> None:
        bounds: dict[str, Any] = {
            "num_blocks": 400,
            "max_batch_tokens": 256,
            "scheduling": Scheduling.SLO,
            "cost_model": MODEL,
            "preempt": Preempt.ALWAYS,
        }
        self.rng = rng
        self.state: PlannerState = make_state(**(bounds | changes))
        self.model = LayeredModel(self.state.config)
        self.now_s = 0.0
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.remaining_s: dict[int, float] = {}

    def arrive(self, service: Service, prompt: int, output: int) -> str:
        name = f"r{len(self.requests)}"
        made = make_request(name, prompt, output, self.rng)
        self.requests[name] = replace(made, service=service, arrival_s=self.now_s)
        self.state.handle(RequestArrived(self.now_s, self.requests[name]))
        self.state.check_invariants()
        return name

    def plan(self) -> Microbatch | None:
        microbatch = self.state.plan(self.now_s)
        self.state.check_invariants()
        if microbatch is None:
            return None
        chunks = microbatch.batch.chunks
        self.model.turn(microbatch.turns)
        if microbatch.resumes is None:
            self.model.begin(microbatch.batch)
            whole_s = MODEL.batch_s((chunk.start, len(chunk.token_ids)) for chunk in chunks)
            self.remaining_s[microbatch.number] = whole_s
        else:
            self.remaining_s[microbatch.number] = self.remaining_s.pop(microbatch.resumes)
        return microbatch

    def interrupt(self, microbatch: Microbatch, part: float) -> None:
        """End the microbatch after `part` of its remainder."""
        assert microbatch.preemptible
        ran_s = part * self.remaining_s[microbatch.number]
        self.now_s += ran_s
        self.remaining_s[microbatch.number] -= ran_s
        resumes = self.state.config.preempted_work is PreemptedWork.RESUME
        event = IterationSuspended if resumes else IterationDropped
        self.state.handle(event(self.now_s))
        self.state.check_invariants()

    def finish(self, microbatch: Microbatch) -> None:
        self.now_s += self.remaining_s.pop(microbatch.number)
        sampled = self.model.end(microbatch.batch)
        for command in self.state.handle(IterationFinished(self.now_s, sampled)):
            assert isinstance(command, EmitToken)
            self.outputs.setdefault(command.request_id, []).append(command.token_id)
        self.state.check_invariants()

    def step(self, interrupted: float) -> None:
        """Run the next microbatch, or interrupt it with this probability if possible."""
        microbatch = self.plan()
        if microbatch is None:
            assert not self.state.sequences, "work is left, and nothing runs"
            self.now_s += 0.01
        elif microbatch.preemptible and self.rng.random() < interrupted:
            self.interrupt(microbatch, self.rng.random())
        else:
            self.finish(microbatch)

    def disturb(self, aborted: set[str], aborts: float) -> None:
        """Abort a request with the probability `aborts`, else demand blocks of batch work."""
        rng, state = self.rng, self.state
        if rng.random() < aborts and state.sequences:
            aborted.add(name := rng.choice(list(state.sequences)))
            state.handle(RequestAborted(self.now_s, name))
        else:
            used = state.config.num_blocks - state.sequence_table.ledger.free
            state.handle(BatchYielded(0, rng.randint(0, max(0, used))))
        state.check_invariants()

    def check_end(self, aborted: set[str]) -> None:
        """All requests have ended with their tokens, except `aborted` ones; no block is in use."""
        assert not self.state.sequences
        for name, request in self.requests.items():
            if name not in aborted:
                assert self.outputs[name] == expected(request)[0]
        assert self.state.load().kv_blocks_free == self.state.config.num_blocks

    def run(self) -> Microbatch:
        microbatch = self.plan()
        assert microbatch is not None
        self.finish(microbatch)
        return microbatch

    def suspend(self, prompt: int = 200, output: int = 3, part: float = 0.5) -> str:
        """A batch request whose first iteration is suspended after `part` of its time."""
        name = self.arrive(BATCH, prompt, output)
        microbatch = self.plan()
        assert microbatch is not None
        self.interrupt(microbatch, part)
        return name

    @property
    def suspended(self) -> bool:
        return self.state.sequence_table.suspended is not None


def online(ttft_s: float | None = None, tpot_s: float | None = None) -> Service:
    return Service(ServiceClass.INTERACTIVE, ttft_s, tpot_s)


@pytest.mark.parametrize(
    "scheduling", [scheduling for scheduling in Scheduling if scheduling is not Scheduling.BROS]
)
def test_a_steady_load_does_not_stop_suspended_work(scheduling: Scheduling) -> None:
    """A stream of online requests of which one can always run. BROS as published cuts no prompt, so
    a long one never runs beside such a load.
    """
    device = Device(random.Random(0), scheduling=scheduling)
    name = device.suspend(part=0.2)
    began_s = ran_s = device.now_s
    current = device.arrive(online(tpot_s=0.03), 4, 60)
    given_up_s = None
    while name in device.state.sequences:
        sequence = device.state.sequences.get(current)
        if sequence is None or sequence.tokens_max - len(sequence.token_ids) < 2:
            current = device.arrive(online(tpot_s=0.03), 4, 60)
        device.run()
        if given_up_s is None and not device.suspended:
            given_up_s = device.now_s - began_s
        assert device.now_s < began_s + 3.0, "it waits for the end of the load"
    assert given_up_s is not None
    assert SUSPENDED_WAIT_FACTOR * ran_s < given_up_s < SUSPENDED_WAIT_FACTOR * ran_s + 0.1
    assert device.state.sequence_table.discarded_tokens_total == 200
    assert device.outputs[name] == expected(device.requests[name])[0]


def test_nearly_finished_work_resumes_beside_online_decodes() -> None:
    device = Device(random.Random(1))
    name = device.suspend(output=1, part=0.9)
    device.arrive(online(tpot_s=0.03), 4, 20)
    first, second = device.run(), device.run()
    assert first.resumes is None, "the prompt of an online request does not wait for it"
    assert second.resumes == 1, "the rest takes less than filling the iteration would"
    assert name in device.outputs and device.state.sequence_table.discarded_tokens_total == 0
    assert device.run().resumes is None


def test_suspended_work_without_a_share_waits_for_idle_time() -> None:
    device = Device(random.Random(1), harvest=0.0)
    device.suspend(part=0.9)
    name = device.arrive(online(), 4, 80)
    while name in device.state.sequences:
        assert device.run().resumes is None
    assert device.run().resumes == 1
    assert device.state.sequence_table.discarded_tokens_total == 0


def test_suspended_work_that_does_not_fit_is_not_resumed() -> None:
    device = Device(random.Random(1))
    device.suspend(part=0.1)
    device.arrive(online(tpot_s=0.03), 4, 20)
    device.run()
    assert [device.run().resumes for _ in range(2)] == [None, None]


def test_a_resumed_iteration_is_not_a_cost_sample() -> None:
    device = Device(random.Random(2))
    device.suspend(part=0.9)
    feedback = device.state._feedback
    assert feedback is not None
    before = replace(feedback.budget)
    assert device.run().resumes == 1
    assert feedback.budget == before
    assert feedback.harvest.share == device.state.config.harvest


@pytest.mark.parametrize(
    ("preempt", "work", "tokens"),
    [
        (Preempt.OFF, PreemptedWork.RESUME, 889),  # half of 0.2 s
        (Preempt.ALWAYS, PreemptedWork.RESUME, 4096),
        (Preempt.DEADLINE, PreemptedWork.RESUME, 4096),
        (Preempt.ALWAYS, PreemptedWork.DISCARD, 1389),  # half of the gap of 0.3 s
    ],
)
def test_the_duration_of_pure_batch_iterations_is_bounded(
    preempt: Preempt, work: PreemptedWork, tokens: int
) -> None:
    device = Device(
        random.Random(3),
        num_blocks=4000,
        max_batch_tokens=4096,
        preempt=preempt,
        preempted_work=work,
    )
    for _ in range(4):
        device.arrive(online(ttft_s=0.2), 4, 1)
        device.now_s += 0.3
        device.run()
        device.now_s = round(device.now_s, 1)
    device.now_s -= 0.1
    device.arrive(BATCH, 6000, 1)
    assert device.run().batch.tokens == pytest.approx(tokens, rel=0.03)


def test_an_uninterruptible_iteration_is_short() -> None:
    """Only one microbatch is suspended at a time: meanwhile an arrival waits for the next."""
    device = Device(random.Random(3), num_blocks=4000, max_batch_tokens=4096)
    device.arrive(online(ttft_s=0.2), 4, 1)
    device.run()
    planner: Any = device.state._planner
    assert (
        planner.harvester.batch_only_limit_s(device.now_s)
        == device.state.config.offline_iteration_s
    )
    device.suspend()
    assert planner.harvester.batch_only_limit_s(device.now_s) == 0.1


def test_discarded_work_completes_between_frequent_arrivals() -> None:
    """Each arrival interrupts; an iteration of two seconds would never end between them."""
    device = Device(
        random.Random(4),
        num_blocks=8000,
        max_batch_tokens=16384,
        preempted_work=PreemptedWork.DISCARD,
    )
    next_s = 0.0
    for _ in range(20):  # what is known of arrivals when the batch work comes
        device.now_s = next_s = next_s + 0.5
        device.arrive(online(), 4, 1)
        device.run()
    name = device.arrive(BATCH, 15000, 2)
    while name in device.state.sequences:
        microbatch = device.plan()
        assert microbatch is not None
        remaining_s = device.remaining_s[microbatch.number]
        if microbatch.preemptible and device.now_s + remaining_s > next_s + 0.5:
            device.interrupt(microbatch, max(0.0, next_s + 0.5 - device.now_s) / remaining_s)
            next_s += 0.5
            device.arrive(online(), 4, 1)
        else:
            device.finish(microbatch)
        assert device.now_s < 60.0, "it begins again with each arrival"
    assert device.outputs[name] == expected(device.requests[name])[0]


@pytest.mark.parametrize("work", PreemptedWork)
@pytest.mark.parametrize("seed", range(25))
def test_random_events_preserve_tokens(seed: int, work: PreemptedWork) -> None:
    """Arrivals, interruptions, aborts and demands for blocks, in any order and at any time."""
    rng = random.Random(seed)
    device = Device(
        rng,
        num_blocks=rng.choice((20, 40, 100)),
        max_batch_tokens=rng.choice((16, 64)),
        max_running=rng.choice((3, 8)),
        prefix_caching=rng.random() < 0.5,
        harvest=rng.choice((0.25, 0.5, 1.0)),
        cost_model=None if rng.random() < 0.2 else MODEL,
        preempted_work=work,
    )
    state, aborted = device.state, set()
    for step in range(5000):
        busy = step < 250
        if not busy and not state.sequences:
            break
        if busy and rng.random() < 0.35:
            _arrive(device)
        elif rng.random() < 0.1:
            device.disturb(aborted, aborts=0.5)
        device.step(interrupted=0.4)
    device.check_end(aborted)


def _arrive(device: Device) -> None:
    rng = device.rng
    if rng.random() < 0.4:
        device.arrive(BATCH, rng.randint(1, 40), rng.randint(1, 20))
        return
    target = rng.choice((None, 0.013, 0.03, 0.2))
    service = rng.choice((DEFAULT_SERVICE, online(rng.choice((None, 0.1)), target)))
    device.arrive(service, rng.randint(1, 30), rng.randint(1, 20))
