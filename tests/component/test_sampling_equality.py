"""What our engine chooses and tells equals what `transformers` makes of its own logits.

Its processors and warpers where it has them, OpenAI's formula for presence and frequency; alone
and in batches, by an engine alone and by several in a group, with preemptions and changes.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.core.memory.layer_map import Stage
from services.core.request import Limits, LogprobOptions, Request, Sampling
from services.worker.engine.runner import RunnerConfig
from services.worker.engine.sampling.draw import uniform
from tests.support.engine_group import EngineGroup, Stream
from tests.support.tiny_models import make_tiny_model

VOCAB = 320
LAYERS = 3
TOKENS = 24
ROOMY_BYTES = 8 << 20


def processors(sampling: Sampling) -> LogitsProcessorList:
    """In the order in which ours come; presence and frequency come after the first."""
    found = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    if sampling.logit_bias:
        bias = [[[token], value] for token, value in sampling.logit_bias]
        found.append(SequenceBiasLogitsProcessor(bias))
    if sampling.bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    return found


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """What comes before the draw."""
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        found.append(MinPLogitsWarper(sampling.min_p))
    return found


@dataclass
class Reference:
    """`transformers`, one request at a time."""

    model: transformers.PreTrainedModel

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab]"""
        return self.model(torch.tensor([tokens])).logits[0]

    def next_token(self, request: Request, output: list[int], logits: torch.Tensor) -> int:
        """The token after `output`, from the raw logits of the last position."""
        sampling = request.sampling
        history = torch.tensor([[*request.prompt_ids, *output]])
        first, *others = processors(sampling)
        row = first(history, logits[None])
        for token, count in Counter(output).items():
            row[0, token] -= count * sampling.frequency_penalty + sampling.presence_penalty
        row = LogitsProcessorList(others)(history, row)
        if sampling.allowed_token_ids:
            kept = list(sampling.allowed_token_ids)
            row = torch.full_like(row, -torch.inf).index_copy_(1, torch.tensor(kept), row[:, kept])
        if len(output) < request.limits.min_tokens:
            row[0, list(request.limits.stop_token_ids)] = -torch.inf
        if sampling.temperature == 0:
            return int(row[0].argmax())
        weights = torch.softmax(warpers(sampling)(history, row)[0], -1)
        order = torch.arange(len(weights))
        if sampling.top_k or sampling.top_p < 1:
            order = torch.argsort(weights, descending=True, stable=True)
        mass = weights[order].cumsum(0)
        draw = uniform(sampling.seed, len(output)) * mass[-1]
        return int(order[int(torch.searchsorted(mass, draw, right=True))])

    @torch.inference_mode()
    def answer(self, request: Request) -> list[int]:
        """The whole output."""
        output: list[int] = []
        made = self.model(torch.tensor([request.prompt_ids]), use_cache=True)
        while True:
            output.append(self.next_token(request, output, made.logits[0, -1]))
            ended = output[-1] in request.limits.stop_token_ids
            if ended or len(output) == request.limits.max_tokens:
                return output
            last = torch.tensor([output[-1:]])
            made = self.model(last, past_key_values=made.past_key_values, use_cache=True)

    def check_logprobs(self, stream: Stream) -> None:
        """Of output and prompt, against a log-softmax of the raw logits."""
        prompt = list(stream.request.prompt_ids)
        tokens = prompt + stream.tokens
        logprobs = torch.log_softmax(self.logits(tokens), -1)
        told = [*(stream.prompt_logprobs or []), *stream.logprobs]
        asked = stream.request.logprobs
        first = 1 if asked.prompt is not None else len(prompt)
        end = len(tokens) if asked.output is not None else len(prompt)
        assert len(told) == end - first
        for position, found in enumerate(told, first):
            row = logprobs[position - 1]
            own = row[tokens[position]]
            assert found.logprob == pytest.approx(float(own), abs=1e-5)
            assert found.rank == 1 + int((row > own).sum())
            top = asked.prompt if position < len(prompt) else asked.output
            assert top is not None
            best = torch.topk(row, top)
            assert [token for token, _ in found.top] == best.indices.tolist()
            assert [one for _, one in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def sampling_of(number: int, rng: random.Random, prompt: tuple[int, ...]) -> Sampling:
    """Each rule alone first, then some together; greedy and seeded by turns."""
    tokens = rng.sample(range(VOCAB), 100)
    words = (prompt[-1:] + tuple(tokens[:1]), tuple(tokens[1:2]), tuple(tokens[2:5]))
    rules: tuple[dict[str, object], ...] = (
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.7},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -0.5},
        {"logit_bias": ((tokens[0], 6.0), (tokens[1], -100.0))},
        {"bad_words": words},
        {"allowed_token_ids": tuple(tokens)},
        {"min_p": 0.1},
    )
    chosen = dict(rules[number % len(rules)])
    if number >= 2 * len(rules):
        for one in rng.sample(rules, 3):
            chosen |= one
    greedy = number // len(rules) % 2 == 0
    if greedy:
        return Sampling(0.0, **chosen)  # type: ignore[arg-type]
    filters: dict[str, object] = rng.choice([{}, {"top_k": 30}, {"top_p": 0.9}])
    return Sampling(rng.choice([0.7, 1.3]), seed=number, **(filters | chosen))  # type: ignore[arg-type]


def requests_of(count: int) -> list[Request]:
    rng = random.Random(5)
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 7, 30, 90])))
        stops = frozenset(rng.sample(range(3, VOCAB), 40))
        limits = Limits(TOKENS, rng.choice([0, 12]), stops if number % 4 == 0 else frozenset())
        asked = LogprobOptions(rng.choice([None, 0, 5]), rng.choice([None, 0, 4]))
        sampling = sampling_of(number, rng, prompt)
        made.append(Request(f"r{number}", prompt, sampling, limits, 0.0, asked))
    return made


@dataclass
class Case:
    config: RunnerConfig
    reference: Reference
    requests: list[Request]
    answers: list[list[int]]

    def check(self, group: EngineGroup) -> None:
        """Every stream that has run has the answer of the reference."""
        for request, answer in zip(self.requests, self.answers, strict=True):
            stream = group.streams[request.request_id]
            assert not stream.refused
            assert stream.tokens == answer, request
            self.reference.check_logprobs(stream)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)  # tests run side by side
    folder: Path = tmp_path_factory.mktemp("llama")
    model_dir = make_tiny_model(folder, "llama", vocab=VOCAB, layers=LAYERS)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    reference, requests = Reference(model), requests_of(45)
    config = RunnerConfig(
        model_dir=model_dir,
        device="cpu",
        dtype=torch.float64,
        budget_bytes=ROOMY_BYTES,
        block_size=4,
        chunk_bytes=4096,
        max_batch_tokens=64,
        max_running=16,
        max_model_len=128,
        threads=1,
    )
    return Case(config, reference, requests, [reference.answer(one) for one in requests])


@pytest.fixture
def roomy(case: Case) -> Iterator[EngineGroup]:
    group = EngineGroup(case.config, 1, seed=1)
    yield group
    group.close()


def test_alone(case: Case, roomy: EngineGroup) -> None:
    for request in case.requests:
        roomy.start(request)
        roomy.finish()
    case.check(roomy)


def test_in_batches(case: Case, roomy: EngineGroup) -> None:
    for request in case.requests:
        roomy.start(request)
    roomy.finish()
    case.check(roomy)
    roomy.check_at_rest()
    # What was known of them is forgotten, once there is more of it than requests with blocks.
    roomy.start(replace(case.requests[0], request_id="last"))
    roomy.finish()
    assert len(roomy.engines["w0"].runner.sampler) <= 2


def test_with_preemptions_and_changes_of_groups(case: Case) -> None:
    """Little room for K/V, three engines that merge, split, and merge otherwise all the while."""
    probe = EngineGroup(case.config, 1, seed=1)
    spare = probe.engines["w0"].runner.num_blocks - 40
    block_bytes = 4 * probe.engines["w0"].runner.kv_bytes_per_token
    probe.close()
    config = replace(case.config, budget_bytes=ROOMY_BYTES - spare * block_bytes)
    group = EngineGroup(config, 3, seed=7)
    names = ["w0", "w1", "w2"]
    merged = [[Stage("w0", 0, 1), Stage("w1", 1, 2), Stage("w2", 2, 3)]]
    otherwise = [[Stage("w2", 0, 2), Stage("w0", 2, 3)], [Stage("w1", 0, 3)]]
    apart = [[Stage(name, 0, LAYERS)] for name in names]
    preemptions = changes = 0
    try:
        waiting = list(case.requests)
        for targets in (merged, apart, otherwise, apart, merged) * 2:
            for _ in range(min(5, len(waiting))):
                group.start(waiting.pop(0))
            for _ in range(250):
                group.turn()
            group.settle()
            attempt = group.prepare(targets)
            if group.await_answers(attempt, targets):
                group.commit(targets)
                changes += 1
            else:
                group.abandon(attempt, targets)
        for request in waiting:
            group.start(request)
        group.finish()
        case.check(group)
        group.check_at_rest()
        preemptions = sum(one.member.state.preemptions_total for one in group.engines.values())
    finally:
        group.close()
    assert changes >= 3 and preemptions > 0
