"""Our engine's tokens and log probabilities equal those of `transformers`.

Alone and in batches, by an engine alone and by several in a group, with preemptions and changes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import transformers

from services.core.groups.layer_map import Stage
from services.core.request import Limits, LogprobOptions, Request, Sampling
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.engine_group import EngineGroup
from tests.support.tiny_models import make_tiny_model
from tests.support.transformers_reference import Reference

VOCAB = 320
LAYERS = 3
TOKENS = 24
ROOMY_BYTES = 8 << 20


def sampling_of(number: int, rng: random.Random, prompt: tuple[int, ...]) -> Sampling:
    """Each rule alone first, then combinations; greedy and seeded alternately."""
    tokens = rng.sample(range(VOCAB), 100)
    bad_words = (prompt[-1:] + tuple(tokens[:1]), tuple(tokens[1:2]), tuple(tokens[2:5]))
    rules: tuple[dict[str, object], ...] = (
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.7},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -0.5},
        {"logit_bias": ((tokens[0], 6.0), (tokens[1], -100.0))},
        {"bad_words": bad_words},
        {"allowed_token_ids": tuple(tokens)},
        {"min_p": 0.1},
    )
    chosen = dict(rules[number % len(rules)])
    if number >= 2 * len(rules):
        for rule in rng.sample(rules, 3):
            chosen |= rule
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
        """Check that every stream has the output of the reference."""
        for request, answer in zip(self.requests, self.answers, strict=True):
            stream = group.streams[request.request_id]
            assert not stream.refused
            assert stream.tokens == answer, request
            self.reference.check_logprobs(
                request, stream.tokens, stream.prompt_logprobs, stream.logprobs
            )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)  # tests run concurrently
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
    return Case(config, reference, requests, [reference.answer(request) for request in requests])


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
    # The sampler drops ended requests once it knows more requests than hold blocks.
    roomy.start(replace(case.requests[0], request_id="last"))
    roomy.finish()
    assert len(roomy.engines["w0"].runner.sampler) <= 2


def test_with_preemptions_and_changes_of_groups(case: Case) -> None:
    """Three engines with little KV memory that merge, split and merge differently."""
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
                group.abort_attempt(attempt, targets)
        for request in waiting:
            group.start(request)
        group.finish()
        case.check(group)
        group.check_at_rest()
        preemptions = sum(
            engine.member.state.preemptions_total for engine in group.engines.values()
        )
    finally:
        group.close()
    assert changes >= 3 and preemptions > 0
