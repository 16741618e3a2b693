"""SmolLM2 against `transformers`: equal in float32, within rounding in bfloat16."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from services.core.planner.batch import Batch, Chunk
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from tests.support.generation import GREEDY, generate_tokens
from tests.support.near_ties import count_excused
from tideserve.cli.cache import cache_root
from tideserve.cli.model_store import prepare_default_model

NEW_TOKENS = 64
ALONE_TOKENS = 32
"""Output tokens of a lone request, whose steps are the slowest here."""
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at",
    "The three laws of robotics are:\n1.",
    "Explain in one paragraph why the sky is blue. " * 20,
    "A list of prime numbers: 2, 3, 5, 7,",
    "Dear Sir or Madam,\n\n" + "I write to you about the tide tables. " * 12,
)


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return prepare_default_model(cache_root(), print)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


def runner_in(model_dir: Path, dtype: torch.dtype) -> Iterator[ModelRunner]:
    runner = ModelRunner.load(
        RunnerConfig(
            model_dir=model_dir,
            device="cpu",
            dtype=dtype,
            budget_bytes=1 << 30,
            max_batch_tokens=512,
            threads=1,  # tests run concurrently
        )
    )
    yield runner
    runner.check_invariants()
    runner.close()


@pytest.fixture(scope="module")
def float32_runner(model_dir: Path) -> Iterator[ModelRunner]:
    yield from runner_in(model_dir, torch.float32)


@pytest.fixture(scope="module")
def bfloat16_runner(model_dir: Path) -> Iterator[ModelRunner]:
    yield from runner_in(model_dir, torch.bfloat16)


@pytest.mark.parametrize("together", [True, False], ids=["mixed batches", "alone"])
def test_float32_is_greedy_equal_to_transformers(
    float32_runner: ModelRunner,
    reference: transformers.PreTrainedModel,
    prompts: list[list[int]],
    together: bool,
) -> None:
    tokens = NEW_TOKENS if together else ALONE_TOKENS
    outputs = [
        output
        for part in ([prompts] if together else [[prompt] for prompt in prompts])
        for output in generate_tokens(float32_runner, part, max_tokens=tokens, seed=0)
    ]
    excused = sum(
        count_excused(reference, prompt, output, GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True)
    )
    print(f"{excused} of {len(prompts) * tokens} tokens excused")


@torch.inference_mode()
def test_bfloat16_is_near(
    bfloat16_runner: ModelRunner,
    reference: transformers.PreTrainedModel,
    prompts: list[list[int]],
) -> None:
    """Weights, KV and inputs of products are rounded; most positions keep their best token.

    `transformers` rounds more, so its own bfloat16 is not closer to its float32.
    """
    runner, prompt = bfloat16_runner, prompts[5]
    batch = Batch((Chunk("a", 0, tuple(prompt), tuple(range(40)), None),))
    hidden = runner.decoder.run_layers(
        runner.decoder.embed(torch.tensor(prompt)),
        torch.arange(len(prompt)),
        runner.metadata(batch),
        runner.stage_memory.layers,
    )
    tokens = torch.tensor([prompt])
    expected = torch.log_softmax(reference(tokens).logits[0], -1)

    def beside(logits: torch.Tensor) -> tuple[float, float]:
        """The mean KL divergence, and the share of positions with the same best token."""
        actual = torch.log_softmax(logits.float(), -1)
        divergence = torch.nn.functional.kl_div(actual, expected, log_target=True, reduction="none")
        agree = actual.argmax(-1) == expected.argmax(-1)
        return float(divergence.sum(-1).mean()), float(agree.double().mean())

    divergence, agreement = beside(runner.decoder.logits(hidden))
    rounded = copy.deepcopy(reference).to(torch.bfloat16)
    most, least = beside(rounded(tokens).logits[0])
    print(f"divergence {divergence:.2g} ({most:.2g}), agreement {agreement:.3f} ({least:.3f})")
    assert divergence < min(0.01, 1.2 * most) and agreement > max(0.95, least - 0.02)
