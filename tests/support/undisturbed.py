"""Random requests of a tiny model, and the output of each in an undisturbed run."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.core.planner.batch import Batch, Chunk, PromptScore
from services.core.request import (
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
    TokenLogprobs,
    blocks_for,
)
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_group import Stream
from tests.support.generation import generate_tokens
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_model

CHUNK_BYTES = 4096
REQUESTS = 48
GRAMMARS = ("[a-z]{3,12}( [0-9]{1,4}){0,3}", r'\{"k":"[a-f]{0,9}"(,"n":[0-9]{1,6}){1,4}\}')
COMMON = 3
"""Number of shared prompt prefixes."""


def tight_config(folder: Path, layers: int) -> RunnerConfig:
    """A tiny model in `folder`, with a budget that fits parameters and staging only."""
    make_tiny_model(folder, "llama", layers=layers, hidden=32, heads=2, kv_heads=1)
    roomy = RunnerConfig(
        model_dir=folder,
        device="cpu",
        dtype=torch.float64,
        budget_bytes=1 << 24,
        block_size=4,
        chunk_bytes=CHUNK_BYTES,
        max_batch_tokens=64,
        max_running=16,
        max_model_len=512,
        threads=1,  # two test processes with two threads each would contend for cores
    )
    runner = ModelRunner.load(roomy)
    plan = runner.stage_memory.plan
    runner.close()
    parameter_bytes = plan.parameter_chunks * plan.chunk_bytes
    return replace(roomy, budget_bytes=plan.staging_bytes + parameter_bytes)


def random_request(rng: random.Random, number: int) -> Request:
    greedy = rng.random() < 0.5
    sampling = Sampling(temperature=0.0) if greedy else Sampling(0.9, 0.95, 20, number)
    prompt = tuple(rng.randrange(3, 300) for _ in range(rng.randint(1, 40)))
    stops = frozenset(rng.sample(range(3, 300), 8)) if rng.random() < 0.3 else frozenset()
    limits = Limits(rng.randint(1, 24), stop_token_ids=stops)
    if number % 3 == 0:
        return Request(f"r-{number}", prompt, sampling, limits, 0.0)
    return ruled(Request(f"r-{number}", prompt, sampling, limits, 0.0), rng)


def ruled(request: Request, rng: random.Random) -> Request:
    """The request with stateful sampling rules and log probabilities."""
    prompt = request.prompt_ids
    sampling = replace(
        request.sampling,
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 1.5]),
        frequency_penalty=rng.choice([0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        logit_bias=rng.choice([(), ((rng.randrange(3, 300), 4.0),)]),
        bad_words=rng.choice([(), ((prompt[-1], 7), (8,), (9, 10, 11))]),
        allowed_token_ids=rng.choice([(), tuple(range(2, 250))]),
    )
    limits = request.limits
    if rng.random() < 0.4:
        text = rng.choice(GRAMMARS)
        sampling = replace(sampling, grammar=Grammar(GrammarKind.REGEX, text))
        sampling = replace(sampling, allowed_token_ids=(), bad_words=(), top_k=0)
        limits = Limits(limits.max_tokens, stop_token_ids=frozenset({EOS_TOKEN_ID}))
    asked = LogprobOptions(rng.choice([None, 0, 3]), rng.choice([None, 0, 2]))
    return replace(request, sampling=sampling, limits=limits, logprobs=asked)


class Oracle:
    """Requests, and the output of each when run alone in an engine."""

    def __init__(self, config: RunnerConfig) -> None:
        rng = random.Random(0)
        self.requests = [random_request(rng, number) for number in range(REQUESTS)]
        self.requests[COMMON:] = [self._alike(other) for other in self.requests[COMMON:]]
        runner = ModelRunner.load(replace(config, budget_bytes=config.budget_bytes + (1 << 20)))
        try:
            self._tokens = [self._run(runner, request) for request in self.requests]
            self._rows = [self._rows_of(runner, request) for request in self.requests]
        finally:
            runner.close()

    def tokens(self, request: Request) -> list[int]:
        """The output of `request`, whose id ends in an index of `requests`."""
        return self._tokens[int(request.request_id.split("-")[1])]

    def _alike(self, request: Request) -> Request:
        """The request, with a prompt that shares a prefix with one of the first requests."""
        rng = random.Random(request.request_id)
        begin = self.requests[rng.randrange(COMMON)].prompt_ids
        kept = request.prompt_ids[rng.randrange(len(request.prompt_ids)) :]
        return replace(request, prompt_ids=(*begin, *kept)[:40])

    def check(self, stream: Stream) -> None:
        """Check that a stream equals the undisturbed run, or a prefix of it if aborted."""
        wanted = self.tokens(stream.request)
        if stream.aborted:
            wanted = wanted[: len(stream.tokens)]
        assert stream.tokens == wanted
        rows, prompt_rows = self._rows[int(stream.request.request_id.split("-")[1])]
        asked = stream.request.logprobs
        assert len(stream.logprobs) == (len(wanted) if asked.output is not None else 0)
        for actual, row in zip(stream.logprobs, rows[: len(stream.logprobs)], strict=True):
            assert_near(actual, row)
        if asked.prompt is None or not wanted:
            assert stream.prompt_logprobs is None
            return
        assert stream.prompt_logprobs is not None
        for actual, row in zip(stream.prompt_logprobs, prompt_rows, strict=True):
            assert_near(actual, row)

    def _rows_of(
        self, runner: ModelRunner, request: Request
    ) -> tuple[list[TokenLogprobs], list[TokenLogprobs]]:
        """Log probabilities from one pass over prompt and output, for any request."""
        prompt, output = request.prompt_ids, self.tokens(request)
        tokens = (*prompt, *output)
        blocks = tuple(range(blocks_for(len(tokens), runner.block_size)))
        computed = {}
        for top in {request.logprobs.output, request.logprobs.prompt} - {None}:
            assert top is not None
            asked = PromptScore(0, tokens[1:], top)
            output_of = runner.run_stage(Batch((Chunk("a", 0, tokens, blocks, None, asked),)))
            assert output_of is not None and output_of.notes is not None
            computed[top] = output_of.notes.prompt_logprobs["a"].rows.unpacked()
        rows = computed.get(request.logprobs.output, [])[len(prompt) - 1 :]
        return rows, computed.get(request.logprobs.prompt, [])[: len(prompt) - 1]

    def _run(self, runner: ModelRunner, request: Request) -> list[int]:
        (tokens,) = generate_tokens(
            runner,
            [request.prompt_ids],
            max_tokens=request.limits.max_tokens,
            seed=0,
            samplings=[request.sampling],
            stop_ids=request.limits.stop_token_ids,
        )
        stops = [i for i, token in enumerate(tokens) if token in request.limits.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens


def assert_near(actual: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert actual.rank == wanted.rank
    assert actual.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [token for token, _ in actual.top] == [token for token, _ in wanted.top]
    assert [logprob for _, logprob in actual.top] == pytest.approx(
        [logprob for _, logprob in wanted.top], abs=1e-5
    )
