"""Batch requests interrupted at any layer get the tokens of an undisturbed run."""

import random
from collections.abc import Callable
from pathlib import Path
from select import select

import pytest
import torch
import zmq

from services.common.clock import monotonic_s
from services.core.cost.model import CostModel
from services.core.planner.batch import Batch, Chunk, Microbatch
from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationEvent,
    IterationFinished,
    IterationSuspended,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.preemption import Preempt, PreemptedWork
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.engine.compute.pacer import SLICES, Pacer
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.grammar_check import GrammarCheck
from services.worker.engine.loop import EngineLoop
from services.worker.errors import InvalidBatch
from services.worker.ipc import (
    ApplyConfiguration,
    FromEngine,
    GroupPlan,
    Lane,
    MemberPlan,
    Prepare,
    Prepared,
    Progress,
    StartRequest,
    encode,
    from_engine_decoder,
)
from tests.support.generation import generate_tokens, load_runner
from tests.support.lone_member import lone_member
from tests.support.tiny_models import make_tiny_model

BATCH = Service(ServiceClass.BATCH)
VOCAB, LAYERS, NEW_TOKENS, REQUESTS = 320, 5, 10, 16


def at_layer(layer: int) -> Callable[[], bool]:
    """An interrupt before a layer, counted from the first layer that runs."""
    asked = iter(range(LAYERS + 1))
    return lambda: next(asked) == layer


@pytest.mark.parametrize("work", PreemptedWork)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_do_not_depend_on_interruptions(
    tmp_path: Path, dtype: torch.dtype, work: PreemptedWork
) -> None:
    """With too few blocks for all requests, aborts, and shared prefixes."""
    rng = random.Random(7)
    runner = load_runner(make_tiny_model(tmp_path, vocab=VOCAB, layers=LAYERS, dtype=dtype), dtype)
    try:
        requests, alone = [], {}
        for number in range(REQUESTS):
            prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 90)))
            sampling = Sampling(0.0) if number % 2 else Sampling(0.9, 0.95, 20, number)
            service = Service(ServiceClass.BATCH) if number % 3 else Service()
            name = f"r{number}"
            limits = Limits(NEW_TOKENS)
            requests.append(Request(name, prompt, sampling, limits, 0.0, service=service))
            (alone[name],) = generate_tokens(
                runner, [prompt], max_tokens=NEW_TOKENS, seed=number, samplings=[sampling]
            )
        for seed in range(4):
            _serve(runner, requests, alone, work, random.Random(seed))
    finally:
        runner.close()


def _serve(
    runner: ModelRunner,
    requests: list[Request],
    alone: dict[str, list[int]],
    work: PreemptedWork,
    rng: random.Random,
) -> None:
    bounds = (runner.block_size, rng.choice([12, 24, 60]), 64, 16, REQUESTS)
    state = PlannerState(
        IterationConfig(*bounds, prefix_caching=True, preempt=Preempt.ALWAYS, preempted_work=work)
    )
    outputs: dict[str, list[int]] = {}
    arriving, aborted = rng.sample(requests, REQUESTS), set()
    while arriving or state.sequences:
        if arriving and rng.random() < 0.3:
            state.handle(RequestArrived(0.0, arriving.pop()))
        if state.sequences and rng.random() < 0.02:
            aborted.add(name := rng.choice(list(state.sequences)))
            state.handle(RequestAborted(0.0, name))
        if (microbatch := state.plan(0.0)) is None:
            continue
        for command in state.handle(_run(runner, microbatch, work, rng)):
            assert isinstance(command, EmitToken)
            outputs.setdefault(command.request_id, []).append(command.token_id)
        state.check_invariants()
    for name, tokens in alone.items():
        if name not in aborted:
            assert outputs[name] == tokens
    assert (state.resumed_iterations_total > 0) == (work is PreemptedWork.RESUME)
    assert work is PreemptedWork.RESUME or state.sequence_table.discarded_tokens_total > 0


def _run(
    runner: ModelRunner, microbatch: Microbatch, work: PreemptedWork, rng: random.Random
) -> IterationEvent:
    """Run a microbatch, possibly with an interruption, as a worker does."""
    resumes, interrupted = work is PreemptedWork.RESUME, None
    if microbatch.preemptible and rng.random() < 0.5:
        interrupted = at_layer(rng.randrange(LAYERS))
    if microbatch.resumes is not None:
        output = runner.resume_stage(microbatch.batch, interrupted)
    else:
        suspends = microbatch.preemptible and resumes
        output = runner.run_stage(microbatch.batch, None, interrupted, suspends=suspends)
    if output is None:
        return IterationSuspended(0.0) if resumes else IterationDropped(0.0)
    assert output.sampled is not None
    return IterationFinished(0.0, output.sampled, microbatch.number)


def test_the_layers_before_the_interruption_do_not_run_again(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path, vocab=VOCAB, layers=LAYERS))
    batch = Batch((Chunk("b", 0, tuple(range(20)), (0, 1), None),))
    try:
        whole = runner.run_stage(batch)
        assert runner.run_stage(batch, None, at_layer(3), suspends=True) is None
        assert runner.suspended is not None and runner.suspended.layer == 3
        asked: list[int] = []
        assert runner.resume_stage(batch, lambda: bool(asked.append(0))) == whole
        assert len(asked) == LAYERS - 3 and runner.suspended is None
        with pytest.raises(InvalidBatch, match="not suspended"):
            runner.resume_stage(batch)
        assert runner.run_stage(batch, None, at_layer(2)) is None
        assert runner.suspended is None, "no suspended iteration is left"
    finally:
        runner.close()


ALONE = GroupPlan("g", 1, [MemberPlan("w0", "w0-1", 0, LAYERS, Lane("", ""), Lane("", ""), "")])


@pytest.mark.parametrize("order", [Prepare("t", [ALONE]), ApplyConfiguration([ALONE])])
def test_a_change_begins_within_an_interval_of_a_batch_iteration_of_two_seconds(
    tmp_path: Path, order: Prepare | ApplyConfiguration
) -> None:
    """The engine's loop receives the change in the third part of the iteration."""
    runner = load_runner(make_tiny_model(tmp_path, vocab=VOCAB, layers=LAYERS))
    bounds = (runner.block_size, runner.num_blocks, 64, 16, REQUESTS)
    state = PlannerState(IterationConfig(*bounds, preempt=Preempt.ALWAYS))
    context = zmq.Context.instance()
    servicer, engine = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            servicer.send(encode(order))
            assert select([engine.fileno()], [], [], 10.0)[0]

    frames: list[FromEngine] = []

    def step() -> None:
        loop.step(0)
        while servicer.poll(0):
            frames.append(from_engine_decoder.decode(servicer.recv()))

    pacer = Pacer(CostModel(0.0, 0.0, 2.0, 0.0), sleep=sleep)
    member = lone_member(state, runner, pacer=pacer)
    grammars = GrammarCheck(runner.grammars, monotonic_s)
    batch = Request("b", tuple(range(40)), Sampling(0.0), Limits(3), 0.0, service=BATCH)
    try:
        (alone,) = generate_tokens(runner, [batch.prompt_ids], max_tokens=3, seed=0)
        servicer.bind("inproc://change-interrupts")
        engine.connect("inproc://change-interrupts")
        loop = EngineLoop(member, engine, grammars)
        servicer.send(encode(StartRequest(batch)))
        step()
        assert len(slept) == 3 and max(slept) <= 2.0 / SLICES
        assert state.sequence_table.suspended is not None
        pacer.model = CostModel(0.0, 0.0, 0.0, 0.0)
        step()  # the change begins before anything else runs
        if isinstance(order, ApplyConfiguration):
            assert member.configuration is not None and member.configuration.epoch == 1
        while state.sequences or member.busy_changing:
            step()
        answers = [frame for frame in frames if isinstance(frame, Prepared)]
        assert answers == ([Prepared("t", "")] if isinstance(order, Prepare) else [])
        progress = [frame for frame in frames if isinstance(frame, Progress)]
        assert [token.token_id for frame in progress for token in frame.tokens] == alone
    finally:
        for end in (servicer, engine):
            end.close(linger=0)
        grammars.close()
        member.mover.close()
        runner.close()


def test_an_engine_runs_the_online_request_and_then_continues(tmp_path: Path) -> None:
    runner = load_runner(make_tiny_model(tmp_path, vocab=VOCAB, layers=LAYERS))
    bounds = (runner.block_size, runner.num_blocks, 64, 16, REQUESTS)
    state = PlannerState(IterationConfig(*bounds, preempt=Preempt.ALWAYS))
    # The clock stands still: a suspended iteration is discarded after several times its run time.
    member = lone_member(state, runner, lambda: 0.0)
    prompts = {"batch": tuple(range(40)), "online": (7, 8, 9)}
    request = {
        name: Request(
            name, prompt, Sampling(0.0), Limits(2), 0.0, service=Service(ServiceClass(kind))
        )
        for (name, prompt), kind in zip(prompts.items(), ("batch", "standard"), strict=True)
    }
    try:
        alone = {
            name: generate_tokens(runner, [prompt], max_tokens=2, seed=0)[0]
            for name, prompt in prompts.items()
        }
        member.handle(RequestArrived(0.0, request["batch"]))
        assert member.launch(lambda _: at_layer(2))
        assert state.sequence_table.suspended is not None and not member.take_outbox()
        member.handle(RequestArrived(0.0, request["online"]))
        tokens: list[tuple[str, int]] = []
        while member.launch():
            tokens += [
                (emitted.request_id, emitted.token_id) for emitted in member.take_outbox().tokens
            ]
        assert tokens == [(name, token) for name in ("online", "batch") for token in alone[name]]
        assert state.resumed_iterations_total == 1
        assert member.iteration_tokens.total == 40 + 1 + 3 + 1
    finally:
        member.mover.close()
        runner.close()
