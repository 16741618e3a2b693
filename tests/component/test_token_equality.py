"""Our engine generates the same tokens as `transformers.generate` in any batch."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from services.core.planner.batch import Batch
from services.core.planner.config import IterationConfig
from services.core.planner.events import IterationFinished, RequestArrived
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling, blocks_for
from services.worker.engine.compute.runner import ModelRunner
from tests.support.device import EXACT
from tests.support.generation import GREEDY, Generation, generate_tokens, load_runner
from tests.support.tiny_models import make_tiny_model

NEW_TOKENS = 64
AROUND_BLOCKS = (1, 2, 3, 5, 8, 15, 16, 17, 20, 31, 33, 40, 48, 64, 70, 90, 100, 111, 127, 128)
LONGER = (129, 144, 160, 200, 255, 300, 400, 500, 700, 1000, 1500, 2000)
PROMPT_LENGTHS = (*AROUND_BLOCKS, *LONGER)
VOCAB = 320


def random_prompts(lengths: tuple[int, ...], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def reference_tokens(
    model: transformers.PreTrainedModel,
    prompts: list[list[int]],
    max_tokens: int,
    guesses: list[list[int]],
) -> list[list[int]]:
    """The output of `transformers`. A right guess needs one pass instead of `max_tokens`."""
    model.generation_config.eos_token_id = None
    return [
        guess
        if greedy_after(model, prompt, guess) == guess
        else generated(model, prompt, max_tokens)
        for prompt, guess in zip(prompts, guesses, strict=True)
    ]


@torch.inference_mode()
def greedy_after(
    model: transformers.PreTrainedModel, prompt: list[int], output: list[int]
) -> list[int]:
    """The most likely token at each position of `output`, given all tokens before it."""
    logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best: list[int] = logits.argmax(-1).tolist()
    return best


def generated(model: transformers.PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The output of `generate` for a prompt."""
    output: list[int] = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
    )[0, len(prompt) :].tolist()
    return output


Case = tuple[ModelRunner, list[list[int]], list[list[int]]]


@pytest.fixture(
    scope="module",
    params=("llama", "qwen2", "qwen3"),
)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Case]:
    """A runner, 32 prompts, and the outputs of `transformers`."""
    model_dir = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param, vocab=VOCAB)
    prompts = random_prompts(PROMPT_LENGTHS, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=EXACT)
    runner = load_runner(model_dir)
    guesses = generate_tokens(runner, prompts, max_tokens=NEW_TOKENS, seed=1)
    expected = reference_tokens(model, prompts, NEW_TOKENS, guesses)
    shortest = [generated(model, prompt, NEW_TOKENS) for prompt in prompts[:2]]
    assert shortest == expected[:2], "the reference does not go on as it began"
    yield runner, prompts, expected
    runner.check_invariants()
    runner.close()


def test_alone(case: Case) -> None:
    runner, prompts, expected = case
    actual = generate_tokens(runner, prompts, max_tokens=NEW_TOKENS, seed=2, concurrency=1)
    assert actual == expected


@pytest.mark.parametrize("seed", [3, 4])
def test_mixed_batches(case: Case, seed: int) -> None:
    runner, prompts, expected = case
    shuffled = random.Random(seed).sample(range(len(prompts)), len(prompts))
    actual = generate_tokens(
        runner,
        [prompts[index] for index in shuffled],
        max_tokens=NEW_TOKENS,
        seed=seed,
        concurrency=12,
    )
    assert actual == [expected[index] for index in shuffled]


def test_the_real_planner_with_preemptions(case: Case) -> None:
    """The worker's planner with a third of the blocks that its requests need."""
    runner, prompts, expected = case
    wanted = sum(blocks_for(len(prompt) + NEW_TOKENS, runner.block_size) for prompt in prompts)
    longest = blocks_for(max(map(len, prompts)) + NEW_TOKENS, runner.block_size)
    state = PlannerState(
        IterationConfig(
            block_size=runner.block_size,
            num_blocks=max(longest, wanted // 3),
            max_batch_tokens=256,
            max_running=32,
            max_waiting=len(prompts),
        )
    )
    for number, prompt in enumerate(prompts):
        limits = Limits(max_tokens=NEW_TOKENS)
        request = Request(str(number), tuple(prompt), Sampling(temperature=0), limits, 0.0)
        state.handle(RequestArrived(0.0, request))
    actual: list[list[int]] = [[] for _ in prompts]
    while (microbatch := state.plan(0.0)) is not None:
        sampled = runner.run(microbatch.batch)
        for command in state.handle(IterationFinished(0.0, sampled, microbatch.number)):
            actual[int(command.request_id)].append(command.token_id)
    assert actual == expected
    assert state.preemptions_total > 0
    assert state.pool.free_count == state.config.num_blocks


def long_prompt(case: Case, seed: int) -> tuple[ModelRunner, Generation, list[int]]:
    """A generation with a prompt of 300 tokens, and its expected output."""
    runner, prompts, expected = case
    index = PROMPT_LENGTHS.index(300)
    options = {"samplings": [GREEDY], "batch_tokens": 512, "concurrency": 1}
    generation = Generation(runner, [prompts[index]], max_tokens=NEW_TOKENS, seed=seed, **options)
    return runner, generation, expected[index]


def test_an_interrupted_iteration_has_no_effect(case: Case) -> None:
    runner, generation, expected = long_prompt(case, seed=8)
    run, rng = runner.run, random.Random(1)

    def sometimes_interrupted(batch: Batch) -> dict[str, int] | None:
        asked = iter([False] * rng.randrange(4) + [True])
        run(batch, lambda: next(asked, True))
        return run(batch)

    generation.run_batch = sometimes_interrupted
    assert generation.run() == [expected]


def test_outputs_differ(case: Case) -> None:
    _, _, expected = case
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    varied = [tokens for tokens in expected if len(set(tokens)) > NEW_TOKENS // 8]
    assert len(varied) > len(expected) // 2


def test_sampled_tokens_do_not_depend_on_the_batch(case: Case) -> None:
    runner, prompts, _ = case
    chosen = prompts[:12]
    samplings = [
        Sampling(temperature=0.8, top_p=0.9 + 0.1 * (i % 2), top_k=20 * (i % 3), seed=i)
        for i in range(len(chosen))
    ]
    alone = generate_tokens(
        runner, chosen, max_tokens=32, seed=5, samplings=samplings, concurrency=1
    )
    mixed = generate_tokens(
        runner, chosen, max_tokens=32, seed=6, samplings=samplings, concurrency=12
    )
    assert alone == mixed


def test_a_corrupted_block_changes_the_output(case: Case) -> None:
    runner, generation, expected = long_prompt(case, seed=7)
    while len(generation.token_ids[0]) < 300 + 4:
        generation.step()
    kv_range = runner.stage_memory.kv_ranges[1]
    kv_range.blocks()[generation.tables[0][3]] += 1.0
    assert generation.run() != [expected]


@pytest.mark.parametrize(
    ("arch", "options"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 50}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1},
        ),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ],
)
def test_other_configurations(tmp_path: Path, arch: str, options: dict[str, object]) -> None:
    model_dir = make_tiny_model(tmp_path, arch, vocab=VOCAB, **options)
    prompts = random_prompts((1, 16, 36, 50, 51, 130, 400), seed=8)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=EXACT)
    runner = load_runner(model_dir)
    actual = generate_tokens(runner, prompts, max_tokens=NEW_TOKENS, seed=9)
    runner.close()
    assert actual == reference_tokens(model, prompts, NEW_TOKENS, actual)
