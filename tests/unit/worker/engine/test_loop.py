"""The engine loop: the order of input, output and computation."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any

import pytest

from services.common.clock import monotonic_s
from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.cost.model import CostModel
from services.core.histogram import Histogram
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.events import CostModelLearned, EmitToken
from services.core.planner.plan import Plan
from services.core.planner.preemption import Preempt
from services.core.report import HostReport, ShipmentCounts
from services.core.request import Grammar, GrammarKind, Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.engine.pipeline.serving import EngineOutbox
from services.worker.engine.sampling.grammar import Grammars
from services.worker.ipc import (
    AbortRequest,
    CostsLearned,
    Prepare,
    StartRequest,
    from_engine_decoder,
)
from tests.support.engine_inbox import WAIT_MS, Inbox, open_inbox
from tests.unit.core.planner.test_state import make_state


def member_that(**does: Any) -> SimpleNamespace:
    """A member without a group that reports nothing by itself."""
    defaults = {
        "take": lambda: True,
        "take_outbox": EngineOutbox,
        "configuration": None,
        "settled": True,
        "trouble": "",
        "changeover": SimpleNamespace(isolated=False, requeue_due_s=None),
        "continue_drop": lambda: False,
        "busy_changing": False,
        "state": make_state(),
        "stage": SimpleNamespace(runner=SimpleNamespace(parameter_bytes=0)),
        "pipeline_time": StageTime(),
        "iteration_time": IterationTime(),
        "slowest_iteration_s": 0.5,
        "iteration_tokens": Histogram(),
        "restored_slabs": {},
        "shipments": ShipmentCounts(),
        "host_report": HostReport(),
        "cost_origin": "",
    }
    return SimpleNamespace(**defaults | does)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    with open_inbox(Grammars(Path("none"), 1)) as inbox:
        yield inbox


def readable(watched: Any, wait_s: float = WAIT_MS / 1e3) -> bool:
    """Whether the descriptor polled by the layers asks for an interruption."""
    return bool(select([watched.descriptor], [], [], wait_s)[0])


class Outbox:
    """The outbox of a member, and the request ids of each report that its loop published."""

    def __init__(self, inbox: Inbox) -> None:
        self.published: list[list[str]] = []
        self._inbox = inbox
        self._waiting = EngineOutbox()

    def add(self, request_id: str, token_id: int) -> None:
        self._waiting.tokens.append(EmitToken(request_id, 0, token_id, None))

    def take(self) -> bool:
        """A frame of another member with a token of "a"."""
        self.add("a", 5)
        return True

    def take_outbox(self) -> EngineOutbox:
        outbox, self._waiting = self._waiting, EngineOutbox()
        return outbox

    def read(self) -> None:
        """Read a report of the loop."""
        self.published.append([token.request_id for token in self._inbox.progress().tokens])


def test_tokens_of_other_stages_are_published_before_the_next_microbatch_runs(inbox: Inbox) -> None:
    outbox = Outbox(inbox)

    def launch(interrupts: object) -> bool:
        outbox.read()
        outbox.add("b", 6)
        return True

    member = member_that(take=outbox.take, launch=launch, take_outbox=outbox.take_outbox)
    inbox.loop(member).step(0)
    outbox.read()
    assert outbox.published == [["a"], ["b"]]


@pytest.mark.parametrize("tokens", [1, 8])
def test_results_are_published_while_a_gpu_runs_the_next_iteration(
    inbox: Inbox, tokens: int
) -> None:
    """But before a prefill, whose launch takes nearly as long as its run."""
    outbox = Outbox(inbox)

    def launch(interrupts: Any, meanwhile: Any) -> bool:
        batch = Batch((Chunk("a", 4, (1,) * tokens, (0,), None),))
        interrupts(Microbatch(1, batch))
        if tokens == 1:
            assert not inbox.servicer.poll(0)
            inbox.send(ONLINE)
            meanwhile()
            assert list(loop._inbox) == [ONLINE]  # for the next turn
        outbox.read()
        outbox.add("b", 6)
        return True

    member = member_that(take=outbox.take, launch=launch, take_outbox=outbox.take_outbox)
    loop = inbox.loop(member, overlaps=True)
    loop.step(0)
    assert outbox.published == [["a"]]
    assert not inbox.servicer.poll(0)  # b waits for the next iteration
    member.launch = lambda interrupts, meanwhile: False
    member.handle = lambda event: None
    loop.step(0)
    outbox.read()
    assert outbox.published == [["a"], ["b", "a"]]


def microbatch_of(name: str, *, preemptible: bool = False) -> Microbatch:
    chunk = Chunk(name, 0, (1,) * 8, (0,), None)
    return Microbatch(1, Batch((chunk,)), preemptible=preemptible)


def test_layers_are_interrupted_when_an_abort_comes(inbox: Inbox) -> None:
    """Only the descriptor of the inbox makes the layers poll."""
    asked: list[tuple[bool, bool]] = []

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("a"))
        asked.append((watched(), readable(watched, 0)))
        inbox.send(AbortRequest("b"))
        readable(watched)
        asked.append((watched(), readable(watched, 0)))
        inbox.send(AbortRequest("a"))
        assert readable(watched)
        asked.append((watched(), True))
        return True

    member = member_that(launch=launch)
    inbox.loop(member).step(0)
    assert asked == [(False, False), (False, False), (True, True)]


def test_a_start_that_is_aborted_before_its_grammar_is_compiled_is_noted(inbox: Inbox) -> None:
    """The servicer waits for it: earlier events belong to a previous start of the same id."""
    handled: list[object] = []
    member = member_that(handle=handled.append, launch=lambda _: False)
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, "a+"))
    inbox.send(StartRequest(Request("a", (1,), sampling, Limits(4), 0.0)))
    inbox.send(AbortRequest("a"))
    inbox.loop(member).step(0)
    assert inbox.progress().received == ["a"]
    assert handled == []


ONLINE = StartRequest(Request("o", (1, 2), Sampling(0.0), Limits(4), 0.0))
OFFLINE = StartRequest(replace(ONLINE.request, service=Service(ServiceClass.BATCH)))
PREPARE = Prepare("attempt", [])


@pytest.mark.parametrize(
    ("policy", "preemptible", "frame", "interrupts_it"),
    [
        (Preempt.ALWAYS, True, ONLINE, True),
        (Preempt.ALWAYS, True, OFFLINE, False),
        (Preempt.ALWAYS, False, ONLINE, False),
        (Preempt.DEADLINE, True, ONLINE, False),  # it has no deadline
        (Preempt.ALWAYS, True, PREPARE, True),
        (Preempt.ALWAYS, False, PREPARE, False),
    ],
)
def test_batch_work_yields_to_online_requests(
    inbox: Inbox, policy: Preempt, preemptible: bool, frame: Any, interrupts_it: bool
) -> None:
    """Requests never interrupt twice in a row; an order of the memory manager always does."""
    answers: list[bool] = []

    def launch(interrupts: Any) -> bool:
        microbatch = microbatch_of("b", preemptible=preemptible)
        inbox.send(frame)
        for _ in range(2):
            watched = interrupts(microbatch)
            if watched is not None and not answers:
                readable(watched)
            answers.append(watched is not None and watched())
        return True

    member = member_that(launch=launch, state=make_state(preempt=policy))
    inbox.loop(member).step(0)
    assert answers == [interrupts_it, interrupts_it and frame is PREPARE]


def test_the_time_until_batch_work_yields_is_measured(inbox: Inbox) -> None:
    waited_s = 3.0

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("b", preemptible=True))
        for arrival_s in (monotonic_s() - 1.0, monotonic_s() - waited_s):
            inbox.send(StartRequest(replace(ONLINE.request, arrival_s=arrival_s)))
        readable(watched)
        assert watched()
        return True

    member = member_that(launch=launch, state=make_state(preempt=Preempt.ALWAYS))
    loop = inbox.loop(member)
    assert loop._preemption_s.histogram == Histogram()
    loop.step(0)
    histogram = loop._preemption_s.histogram
    assert sum(histogram.counts) == 1
    assert histogram.total >= waited_s, "the longest wait counts"


@pytest.mark.parametrize(("ran_s", "interrupts_it"), [(0.0, True), (900.0, False)])
def test_time_before_a_suspension_counts(inbox: Inbox, ran_s: float, interrupts_it: bool) -> None:
    """The iteration takes 1,000 s in total; the request takes 250 s and has 500 s."""
    answers: list[bool] = []

    def launch(interrupts: Any) -> bool:
        request = replace(
            ONLINE.request, service=Service(ttft_s=600.0), arrival_s=monotonic_s(), waited_s=100.0
        )
        inbox.send(StartRequest(request))
        watched = interrupts(replace(microbatch_of("b", preemptible=True), resumes=1))
        readable(watched)
        answers.append(watched())
        return True

    member = member_that(launch=launch)
    model = CostModel(alpha=0.0, beta=125.0, gamma=0.0, lam=0.0)
    member.state = make_state(preempt=Preempt.DEADLINE, cost_model=model)
    member.state.in_flight.append(Plan(2, resumes=1, ran_s=ran_s))
    inbox.loop(member).step(0)
    assert answers == [interrupts_it]


@pytest.mark.parametrize(
    ("policy", "ttft_s", "again"),
    [
        (Preempt.DEADLINE, 600.0, True),
        (Preempt.DEADLINE, None, False),
        (Preempt.OFF, 600.0, False),
    ],
)
def test_layers_poll_while_a_deadline_is_pending(
    inbox: Inbox, policy: Preempt, ttft_s: float | None, again: bool
) -> None:
    """Time passes without a frame, so an earlier verdict may be outdated."""
    answers: list[tuple[bool, bool]] = []

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("b", preemptible=True))
        answers.append((watched(), watched.time_dependent()))
        service = Service(ServiceClass.INTERACTIVE, ttft_s=ttft_s)
        request = replace(ONLINE.request, service=service, arrival_s=monotonic_s())
        inbox.send(StartRequest(request))
        readable(watched)
        answers.append((watched(), watched.time_dependent()))
        return True

    model = CostModel(alpha=0.0, beta=0.001, gamma=0.0, lam=0.0)
    member = member_that(launch=launch, state=make_state(preempt=policy, cost_model=model))
    inbox.loop(member).step(0)
    assert answers == [(False, False), (False, again)]


@pytest.mark.parametrize("changing", [True, False])
@pytest.mark.parametrize("preemptible", [True, False])
def test_member_frames_interrupt_batch_work_during_a_change(
    inbox: Inbox, changing: bool, preemptible: bool
) -> None:
    """Both the descriptor and the verdict report them."""
    reading, writing = os.pipe()
    answers: list[tuple[bool, bool]] = []

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("b", preemptible=preemptible))
        for _ in range(2):
            answers.append((readable(watched, 0), watched()))
            os.write(writing, b"!")
        return True

    member = member_that(launch=launch, busy_changing=changing)
    loop = inbox.loop(member, (reading,))
    loop._fill_inbox()  # the connection itself makes the socket readable
    loop.step(0)
    noticed = changing and preemptible
    assert answers == [(False, False), (noticed, noticed)]
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_an_infeasible_target_is_logged_once(
    inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    handled: list[object] = []
    model = CostModel(alpha=0.0, beta=0.05, gamma=0.0, lam=0.0)
    state = make_state(cost_model=model)
    member = member_that(handle=handled.append, launch=lambda _: False, state=state)
    service = Service(ServiceClass.INTERACTIVE, ttft_s=1.0, tpot_s=0.01)
    for name in ("a", "b"):
        request = replace(ONLINE.request, request_id=name, service=service)
        inbox.send(StartRequest(request))
    loop = inbox.loop(member)
    while len(handled) < 2:
        assert inbox.engine.poll(WAIT_MS)
        loop.step(0)
    (line,) = [record.getMessage() for record in caplog.records if "tpot_ms" in record.getMessage()]
    assert "10 ms" in line and "50 ms" in line and "interactive" in line


def test_a_cost_model_is_sent_when_it_predicts_other_times(inbox: Inbox) -> None:
    """Twice as slow, and then slower by a few percent."""
    first = CostModel(alpha=0.0, beta=0.05, gamma=0.1, lam=0.1)
    state = make_state(cost_model=first)
    member = member_that(launch=lambda _: False, state=state)
    loop = inbox.loop(member)
    state.handle(CostModelLearned(first.slowed(2)))
    loop.step(0)
    assert from_engine_decoder.decode(inbox.servicer.recv()) == CostsLearned(first.slowed(2))
    inbox.progress()
    state.handle(CostModelLearned(first.slowed(2.1)))
    member.trouble = "something to report at once"
    loop.step(0)
    inbox.progress()
