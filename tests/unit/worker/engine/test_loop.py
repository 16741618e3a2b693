"""The engine's turn: in which order it takes, tells and computes."""

import os
from dataclasses import replace
from pathlib import Path
from select import select
from types import SimpleNamespace
from typing import Any, cast

import pytest
import zmq

from services.common.clock import monotonic_s
from services.core.cost.bubble import StageTime
from services.core.cost.iteration_time import IterationTime
from services.core.cost.iteration_tokens import IterationTokens
from services.core.cost.model import CostModel
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.events import EmitToken
from services.core.planner.impossible import ImpossibleTargets
from services.core.planner.plan import Plan
from services.core.planner.preemption import Preempt
from services.core.request import Grammar, GrammarKind, Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.engine.grammar_check import GrammarCheck
from services.worker.engine.loop import EngineLoop
from services.worker.engine.pipeline.serving import News
from services.worker.engine.sampling.grammar import Grammars
from services.worker.ipc import (
    AbortRequest,
    Prepare,
    Progress,
    StartRequest,
    encode,
    from_engine_decoder,
)
from tests.unit.core.planner.test_state import make_state

WAIT_MS = 10_000


def member_that(**does: Any) -> SimpleNamespace:
    """A member of no group, with nothing to tell but what it does."""
    defaults = {
        "take": lambda: True,
        "take_news": News,
        "configuration": None,
        "settled": True,
        "trouble": "",
        "changeover": SimpleNamespace(left=False, return_due_s=None),
        "busy_changing": False,
        "state": make_state(),
        "stage": SimpleNamespace(runner=SimpleNamespace(parameter_bytes=0)),
        "pipeline_time": StageTime(),
        "iteration_time": IterationTime(),
        "slowest_iteration_s": 0.5,
        "iteration_tokens": IterationTokens(),
    }
    return SimpleNamespace(**defaults | does)


def test_tokens_of_other_stages_are_published_before_the_next_microbatch_runs() -> None:
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    came = News()
    told: list[list[str]] = []

    def take() -> bool:
        came.tokens.append(EmitToken("a", 0, 5, None))
        return True

    def take_news() -> News:
        nonlocal came
        news, came = came, News()
        return news

    def hear() -> None:
        assert servicer.poll(WAIT_MS), "a token waits for the next turn, or a whole microbatch"
        frame = from_engine_decoder.decode(servicer.recv())
        assert isinstance(frame, Progress)
        told.append([token.request_id for token in frame.tokens])

    def launch(interrupts: object) -> bool:
        hear()
        came.tokens.append(EmitToken("b", 0, 6, None))
        return True

    member = member_that(take=take, launch=launch, take_news=take_news)
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    try:
        servicer.bind("inproc://engine-loop")
        engine.connect("inproc://engine-loop")
        EngineLoop(cast(Any, member), engine, grammars).step(0)
        hear()
        assert told == [["a"], ["b"]]
    finally:
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()


def microbatch_of(name: str, *, preemptible: bool = False) -> Microbatch:
    chunk = Chunk(name, 0, (1,) * 8, (0,), None)
    return Microbatch(1, Batch((chunk,)), preemptible=preemptible)


def test_layers_are_interrupted_when_an_abort_comes() -> None:
    """The descriptor of the inbox tells the layers to ask, and only then."""
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    asked: list[tuple[bool, bool]] = []

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("a"))
        asked.append((watched(), bool(select([watched.descriptor], [], [], 0)[0])))
        servicer.send(encode(AbortRequest("b")))
        select([watched.descriptor], [], [], WAIT_MS / 1e3)
        asked.append((watched(), bool(select([watched.descriptor], [], [], 0)[0])))
        servicer.send(encode(AbortRequest("a")))
        assert select([watched.descriptor], [], [], WAIT_MS / 1e3)[0]
        asked.append((watched(), True))
        return True

    member = member_that(launch=launch)
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    try:
        servicer.bind("inproc://engine-aborts")
        engine.connect("inproc://engine-aborts")
        EngineLoop(cast(Any, member), engine, grammars).step(0)
        assert asked == [(False, False), (False, False), (True, True)]
    finally:
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()


def test_a_start_that_is_aborted_before_its_grammar_is_compiled_is_noted() -> None:
    """The servicer waits for that: what came before is of an earlier start of the same id."""
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    handled: list[object] = []
    member = member_that(handle=handled.append, launch=lambda _: False)
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    sampling = Sampling(grammar=Grammar(GrammarKind.REGEX, "a+"))
    try:
        servicer.bind("inproc://engine-noted")
        engine.connect("inproc://engine-noted")
        servicer.send(encode(StartRequest(Request("a", (1,), sampling, Limits(4), 0.0))))
        servicer.send(encode(AbortRequest("a")))
        EngineLoop(cast(Any, member), engine, grammars).step(0)
        assert servicer.poll(WAIT_MS)
        frame = from_engine_decoder.decode(servicer.recv())
        assert isinstance(frame, Progress) and frame.received == ["a"]
        assert handled == []
    finally:
        grammars.close()
        for socket in (servicer, engine):
            socket.close(0)


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
def test_batch_work_gives_way(
    policy: Preempt, preemptible: bool, frame: Any, interrupts_it: bool
) -> None:
    """Requests interrupt never twice in a row; an order of the memory manager always does."""
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    answers: list[bool] = []

    def launch(interrupts: Any) -> bool:
        microbatch = microbatch_of("b", preemptible=preemptible)
        servicer.send(encode(frame))
        for _ in range(2):
            watched = interrupts(microbatch)
            if watched is not None and not answers:
                select([watched.descriptor], [], [], WAIT_MS / 1e3)
            answers.append(watched is not None and watched())
        return True

    member = member_that(launch=launch, state=make_state(preempt=policy))
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    try:
        servicer.bind("inproc://engine-preempts")
        engine.connect("inproc://engine-preempts")
        EngineLoop(cast(Any, member), engine, grammars).step(0)
        assert answers == [interrupts_it, interrupts_it and frame is PREPARE]
    finally:
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()


@pytest.mark.parametrize(("ran_s", "interrupts_it"), [(0.0, True), (900.0, False)])
def test_what_a_resumed_iteration_has_run_before_counts(ran_s: float, interrupts_it: bool) -> None:
    """It takes 1,000 s in all, and the request, which takes 250 s, has 500 s."""
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    answers: list[bool] = []

    def launch(interrupts: Any) -> bool:
        request = replace(
            ONLINE.request, service=Service(ttft_s=600.0), arrival_s=monotonic_s(), waited_s=100.0
        )
        servicer.send(encode(StartRequest(request)))
        watched = interrupts(replace(microbatch_of("b", preemptible=True), resumes=1))
        select([watched.descriptor], [], [], WAIT_MS / 1e3)
        answers.append(watched())
        return True

    member = member_that(launch=launch)
    model = CostModel(alpha=0.0, beta=125.0, gamma=0.0, lam=0.0)
    member.state = make_state(preempt=Preempt.DEADLINE, cost_model=model)
    member.state.in_flight.append(Plan(2, resumes=1, ran_s=ran_s))
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    try:
        servicer.bind("inproc://engine-resumed")
        engine.connect("inproc://engine-resumed")
        EngineLoop(cast(Any, member), engine, grammars).step(0)
        assert answers == [interrupts_it]
    finally:
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()


@pytest.mark.parametrize(
    ("policy", "ttft_s", "again"),
    [
        (Preempt.DEADLINE, 600.0, True),
        (Preempt.DEADLINE, None, False),
        (Preempt.OFF, 600.0, False),
    ],
)
def test_layers_ask_again_while_a_deadline_waits(
    policy: Preempt, ttft_s: float | None, again: bool
) -> None:
    """Time passes without a frame: what was answered first may be wrong then."""
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    answers: list[tuple[bool, bool]] = []

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("b", preemptible=True))
        answers.append((watched(), watched.asks_again()))
        service = Service(ServiceClass.INTERACTIVE, ttft_s=ttft_s)
        request = replace(ONLINE.request, service=service, arrival_s=monotonic_s())
        servicer.send(encode(StartRequest(request)))
        select([watched.descriptor], [], [], WAIT_MS / 1e3)
        answers.append((watched(), watched.asks_again()))
        return True

    model = CostModel(alpha=0.0, beta=0.001, gamma=0.0, lam=0.0)
    member = member_that(launch=launch, state=make_state(preempt=policy, cost_model=model))
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    try:
        servicer.bind("inproc://engine-again")
        engine.connect("inproc://engine-again")
        EngineLoop(cast(Any, member), engine, grammars).step(0)
        assert answers == [(False, False), (False, again)]
    finally:
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()


@pytest.mark.parametrize("changing", [True, False])
@pytest.mark.parametrize("preemptible", [True, False])
def test_all_that_comes_from_members_interrupts_batch_work_while_groups_change(
    changing: bool, preemptible: bool
) -> None:
    """The descriptor that layers look at tells of them, and so does the answer."""
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    reading, writing = os.pipe()
    answers: list[tuple[bool, bool]] = []

    def launch(interrupts: Any) -> bool:
        watched = interrupts(microbatch_of("b", preemptible=preemptible))
        for _ in range(2):
            readable = bool(select([watched.descriptor], [], [], 0)[0])
            answers.append((readable, watched()))
            os.write(writing, b"!")
        return True

    member = member_that(launch=launch, busy_changing=changing)
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    try:
        servicer.bind("inproc://engine-members")
        engine.connect("inproc://engine-members")
        loop = EngineLoop(cast(Any, member), engine, grammars, (reading,))
        loop._fill_inbox()  # the connection itself makes the socket readable
        loop.step(0)
        noticed = changing and preemptible
        assert answers == [(False, False), (noticed, noticed)]
    finally:
        for descriptor in (reading, writing):
            os.close(descriptor)
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()


def test_a_target_that_no_request_can_keep_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    handled: list[object] = []
    member = member_that(handle=handled.append, launch=lambda _: False)
    grammars = GrammarCheck(Grammars(Path("none"), 1), lambda: 0.0)
    impossible = ImpossibleTargets(CostModel(alpha=0.0, beta=0.05, gamma=0.0, lam=0.0))
    service = Service(ServiceClass.INTERACTIVE, ttft_s=1.0, tpot_s=0.01)
    try:
        servicer.bind("inproc://engine-impossible")
        engine.connect("inproc://engine-impossible")
        for name in ("a", "b"):
            request = replace(ONLINE.request, request_id=name, service=service)
            servicer.send(encode(StartRequest(request)))
        loop = EngineLoop(cast(Any, member), engine, grammars, impossible=impossible)
        while len(handled) < 2:
            assert engine.poll(WAIT_MS)
            loop.step(0)
        (line,) = [one.getMessage() for one in caplog.records if "tpot_ms" in one.getMessage()]
        assert "10 ms" in line and "50 ms" in line and "interactive" in line
    finally:
        servicer.close(linger=0)
        engine.close(linger=0)
        grammars.close()
