"""Requests that share cached prefixes get the same tokens as alone."""

import random
from pathlib import Path

import pytest

from services.core.planner.config import IterationConfig
from services.core.planner.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    RequestAborted,
    RequestArrived,
)
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner
from tests.support.generation import generate_tokens, load_runner
from tests.support.tiny_models import make_tiny_model

VOCAB = 320
NEW_TOKENS = 20
REQUESTS = 40


class Prefixed:
    """Requests with shared prefixes, and the output of each when run alone."""

    def __init__(self, runner: ModelRunner, rng: random.Random) -> None:
        self.requests: list[Request] = []
        self.tokens: dict[str, list[int]] = {}
        known: list[tuple[int, ...]] = [()]
        for number in range(REQUESTS):
            begin = rng.choice(known[-8:])
            fresh = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30)))
            prompt = (*begin[: rng.randint(0, len(begin))], *fresh)[:150]
            sampling = Sampling(0.0) if number % 2 else Sampling(0.9, 0.95, 20, number)
            name = f"r{number}"
            request = Request(name, prompt, sampling, Limits(NEW_TOKENS), 0.0)
            self.requests.append(request)
            (self.tokens[name],) = generate_tokens(
                runner, [prompt], max_tokens=NEW_TOKENS, seed=number, samplings=[sampling]
            )
            known.append((*prompt, *self.tokens[name]))


@pytest.mark.parametrize(
    ("arch", "options"), [("llama", {}), ("qwen3", {}), ("mistral", {"sliding_window": 50})]
)
def test_tokens_are_those_of_each_request_alone(
    tmp_path: Path, arch: str, options: dict[str, int]
) -> None:
    """With too few blocks for all requests, aborts, and discarded iterations."""
    rng = random.Random(arch)
    runner = load_runner(make_tiny_model(tmp_path, arch, vocab=VOCAB, **options))
    try:
        prefixed = Prefixed(runner, rng)
        for blocks in (blocks_for(150 + NEW_TOKENS, runner.block_size), 24, 60):
            _serve(runner, prefixed, blocks, rng)
    finally:
        runner.close()


def _serve(runner: ModelRunner, prefixed: Prefixed, blocks: int, rng: random.Random) -> None:
    state = PlannerState(
        IterationConfig(runner.block_size, blocks, 64, 16, REQUESTS, prefix_caching=True)
    )
    outputs: dict[str, list[int]] = {}
    arriving, aborted = list(prefixed.requests), set()
    while arriving or state.sequences:
        if arriving and rng.random() < 0.3:
            state.handle(RequestArrived(0.0, arriving.pop(0)))
        if state.sequences and rng.random() < 0.01:
            aborted.add(name := rng.choice(list(state.sequences)))
            state.handle(RequestAborted(0.0, name))
        if (microbatch := state.plan(0.0)) is None:
            continue
        sampled = runner.run(microbatch.batch)
        assert sampled is not None
        if rng.random() < 0.05:
            state.handle(IterationDropped(0.0))
            continue
        for command in state.handle(IterationFinished(0.0, sampled, microbatch.number)):
            assert isinstance(command, EmitToken)
            outputs.setdefault(command.request_id, []).append(command.token_id)
        state.check_invariants()
    for name, tokens in prefixed.tokens.items():
        if name not in aborted:
            assert outputs[name] == tokens
    load = state.load()
    assert load.kv_blocks_free == blocks and load.prefix_hits_total > 0
    assert load.preemptions_total > 0 or blocks == 60
