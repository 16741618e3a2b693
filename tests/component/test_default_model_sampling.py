"""SmolLM2 in float32: rules, log probabilities and grammars, alone and in batches."""

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from services.core.planner.config import IterationConfig
from services.core.planner.events import EmitToken, IterationFinished, RequestArrived
from services.core.planner.state import PlannerState
from services.core.report import Load
from services.core.request import (
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
    TokenLogprobs,
)
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.near_ties import count_excused
from tests.support.transformers_reference import Reference
from tideserve.cli.cache import cache_root
from tideserve.cli.model_store import prepare_default_model

TOKENS = 24
EOS = 2
TOLERANCE = 1e-3
"""Tolerance of log probabilities for rounding in float32."""
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "A list of prime numbers: 2, 3, 5, 7,",
    "I write to you about the tide tables. " * 12,
)
SAMPLINGS = (
    Sampling(0.0, repetition_penalty=1.3),
    Sampling(0.0, presence_penalty=1.5, frequency_penalty=0.5),
    Sampling(0.0, logit_bias=((28, 3.0), (198, -50.0))),
    Sampling(0.9, seed=4, repetition_penalty=1.1, frequency_penalty=0.3),
    Sampling(0.8, seed=5, bad_words=((28,), (30, 198))),
    Sampling(0.7, seed=6, min_p=0.05),
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"enum": ["France", "Spain", "Italy"]},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "country", "population"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare_default_model(cache_root(), print)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    torch.set_num_threads(1)  # tests run concurrently
    return Reference(
        transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    )


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> Iterator[ModelRunner]:
    made = ModelRunner.load(
        RunnerConfig(
            model_dir=model_dir,
            device="cpu",
            dtype=torch.float32,
            budget_bytes=1 << 30,
            max_batch_tokens=128,
            threads=1,
        )
    )
    yield made
    made.close()


class Answers:
    """The output of each request."""

    def __init__(self) -> None:
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompts: dict[str, list[TokenLogprobs]] = {}
        self.load = Load(0, 0, 0, 0)

    def note(self, token: EmitToken) -> None:
        name = token.request_id
        self.tokens.setdefault(name, []).append(token.token_id)
        rows = token.logprobs.unpacked() if token.logprobs is not None else []
        self.logprobs.setdefault(name, []).extend(rows)
        if token.prompt_logprobs is not None:
            assert token.index == 0
            self.prompts[name] = token.prompt_logprobs.unpacked()


def serve(
    runner: ModelRunner,
    requests: list[Request],
    blocks: int,
    together: bool,
    prefix_caching: bool = False,
) -> Answers:
    """Run the requests with the worker's planner."""
    config = IterationConfig(
        block_size=runner.block_size,
        num_blocks=blocks,
        max_batch_tokens=128,
        max_running=16,
        max_waiting=100,
        prefix_caching=prefix_caching,
    )
    answers, state = Answers(), PlannerState(config)
    for part in [requests] if together else [[request] for request in requests]:
        for request in part:
            state.handle(RequestArrived(0.0, request))
        while (microbatch := state.plan(0.0)) is not None:
            made = runner.run_stage(microbatch.batch)
            assert made is not None and made.sampled is not None
            done = IterationFinished(0.0, made.sampled, microbatch.number, made.notes)
            for command in state.handle(done):
                assert isinstance(command, EmitToken), command
                answers.note(command)
    answers.load = state.load()
    if together:
        assert state.preemptions_total > 0
    return answers


def requests_of(tokenizer: Tokenizer) -> list[Request]:
    made = []
    for number, sampling in enumerate(SAMPLINGS):
        prompt = tuple(tokenizer.encode(PROMPTS[number % len(PROMPTS)]).ids)
        asked = LogprobOptions(number % 3 * 3, None if number % 2 else 2)
        made.append(Request(f"r{number}", prompt, sampling, Limits(TOKENS), 0.0, asked))
    return made


@pytest.mark.parametrize("together", [True, False], ids=["in batches", "alone"])
def test_rules_and_log_probabilities_equal_those_of_transformers(
    runner: ModelRunner, reference: Reference, tokenizer: Tokenizer, together: bool
) -> None:
    requests = requests_of(tokenizer)
    answers = serve(runner, requests, blocks=13, together=together)
    excused = 0
    for request in requests:
        name = request.request_id
        output = answers.tokens[name]
        assert len(output) == TOKENS
        excused += judge(reference, request, output)
        reference.check_logprobs(
            request, output, answers.prompts.get(name), answers.logprobs[name], TOLERANCE
        )
    assert excused <= 1, "more near-ties than that would be no accident"


@pytest.fixture(scope="module")
def chats(runner: ModelRunner, tokenizer: Tokenizer) -> tuple[list[Request], dict[str, list[int]]]:
    """Turns of two chats with a shared prefix, and their outputs without a cache."""
    story = tuple(tokenizer.encode("A tide table says when the sea is high. " * 5).ids)
    requests: list[Request] = []
    tokens: dict[str, list[int]] = {}
    for chat in range(2):
        prompt = story
        for turn in range(3):
            sampling = Sampling(0.0) if chat else Sampling(0.8, seed=turn)
            question = f" Question {chat}.{turn}: when does one sail?"
            prompt += tuple(tokenizer.encode(question).ids)
            request = Request(f"{chat}.{turn}", prompt, sampling, Limits(TOKENS), 0.0)
            requests.append(request)
            tokens |= serve(runner, [request], blocks=24, together=False).tokens
            prompt += tuple(tokens[request.request_id])
    return requests, tokens


@pytest.mark.parametrize("together", [True, False], ids=["at once", "one by one"])
def test_prefix_caching_changes_no_token(
    runner: ModelRunner, chats: tuple[list[Request], dict[str, list[int]]], together: bool
) -> None:
    """Requests that run together also preempt each other."""
    requests, tokens = chats
    answers = serve(
        runner, requests, blocks=13 if together else 24, together=together, prefix_caching=True
    )
    assert answers.tokens == tokens
    wanted = 0 if together else sum(len(request.prompt_ids) for request in requests[1:]) // 2
    assert answers.load.prefix_hits_total > wanted


def judge(reference: Reference, request: Request, output: list[int]) -> int:
    """Number of tokens that differ from `transformers` within rounding."""
    prompt = list(request.prompt_ids)
    logits = reference.logits(prompt + output)[len(prompt) - 1 : -1]
    excused = 0
    for index, token in enumerate(output):
        wanted = reference.next_token(request, output[:index], logits[index])
        if wanted == token:
            continue
        row = reference.processed(request, output[:index], logits[index])
        if request.sampling.temperature == 0:
            assert row[wanted] - row[token] < 1e-3
        else:
            # Only a neighbour in sampling order can be explained by rounding.
            weights = reference.weights(request, output[:index], row)
            low, high = sorted((wanted, token))
            assert float(weights[low + 1 : high].sum()) < 1e-4
        excused += 1
    return excused


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0), Sampling(0.9, 0.95, seed=3)], ids=["greedy", "seeded"]
)
def test_outputs_under_a_schema_validate(
    runner: ModelRunner,
    reference: Reference,
    tokenizer: Tokenizer,
    model_dir: Path,
    sampling: Sampling,
) -> None:
    """Also with preemptions; greedy outputs equal those of the reference's logits."""
    text = json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    grammar = Grammar(GrammarKind.JSON_SCHEMA, text)
    limits = Limits(64, stop_token_ids=frozenset({EOS}))
    requests = []
    for number, prompt in enumerate(PROMPTS * 2):
        own = Sampling(
            sampling.temperature, sampling.top_p, seed=sampling.seed + number, grammar=grammar
        )
        ids = tuple(tokenizer.encode(prompt).ids)
        requests.append(Request(f"r{number}", ids, own, limits, 0.0))
    answers = serve(runner, requests, blocks=24, together=True)
    for request in requests:
        output = answers.tokens[request.request_id]
        assert output[-1] == EOS
        jsonschema.validate(json.loads(tokenizer.decode(output[:-1])), SCHEMA)
        if sampling.temperature == 0:
            prompt_ids, stops = list(request.prompt_ids), limits.stop_token_ids
            count_excused(reference.model, prompt_ids, output, request.sampling, stops, model_dir)
