"""Whole models with compiled kernels in float32 and bfloat16, compared with float64 without."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.core.groups.slab_names import EMBEDDING, layer_name
from services.core.planner.batch import Batch, Chunk, SampleSpec
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.model.fused_layer import FusedLayer
from services.worker.engine.model.interrupt import Interrupted, WatchedInterrupt
from services.worker.engine.model.linear import SlabLinear
from tests.support.generation import load_runner
from tests.support.panels import PANEL_DTYPES, needs_panel_product, needs_vectors
from tests.support.tiny_models import make_tiny_model

PROMPT, DECODED = 21, 20
FITTING = {"hidden": 128, "heads": 2, "kv_heads": 1, "tie_word_embeddings": True}
"""Sizes at which all weights fit into panels, also the head's, which embeds tokens as well."""


@torch.inference_mode()
def run_layers(
    runner: ModelRunner, batch: Batch, interrupted: Callable[[], bool] | None = None
) -> torch.Tensor:
    """The hidden states after all layers."""
    tokens = torch.tensor([token for chunk in batch.chunks for token in chunk.token_ids])
    positions = [c.start + index for c in batch.chunks for index in range(len(c.token_ids))]
    decoder = runner.decoder
    return decoder.run_layers(
        decoder.embed(tokens),
        torch.tensor(positions),
        runner.metadata(batch),
        range(runner.geometry.num_layers),
        interrupted,
    )


@torch.inference_mode()
def logits(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """Logits of the last token of each chunk, in float64."""
    hidden = run_layers(runner, batch)
    ends = torch.tensor([len(chunk.token_ids) for chunk in batch.chunks]).cumsum(0) - 1
    return runner.decoder.logits(hidden[ends]).double()


def uses_kernels(runner: ModelRunner) -> bool:
    layers = runner.decoder._layers
    modules = [module for layer in layers for module in layer.modules()]
    products = [module for module in modules if isinstance(module, SlabLinear)]
    assert products
    return all(isinstance(layer, FusedLayer) for layer in layers) and all(
        product._compiled is not None for product in products
    )


def has_joined_layers(runner: ModelRunner) -> bool:
    return runner.decoder.layer_runner is not None


def uses_panels(runner: ModelRunner) -> bool:
    return all(runner.stage_memory.slabs[name].layout.tag for name in (layer_name(0), EMBEDDING))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "panels"),
    [
        (torch.float32, 1e-4, False),
        pytest.param(torch.float32, 1e-4, True, marks=needs_vectors),
        (torch.bfloat16, 0.1, False),
        pytest.param(torch.bfloat16, 0.1, True, marks=needs_panel_product),
    ],
)
def test_logits_equal_those_of_float64(
    architecture: str, dtype: torch.dtype, tolerance: float, panels: bool, tmp_path: Path
) -> None:
    """Prefill a prompt, then decode three sequences with contexts of different lengths."""
    options = {"sliding_window": 13} if architecture == "mistral" else {}
    if panels:
        options |= FITTING
    model_dir = make_tiny_model(tmp_path, architecture, vocab=320, norm_std=0.3, **options)
    exact, fast = load_runner(model_dir), load_runner(model_dir, dtype)
    assert uses_kernels(fast) and not uses_kernels(exact)
    assert uses_panels(fast) is has_joined_layers(fast) is panels
    tables = [tuple(range(first, first + 4)) for first in (0, 4, 8)]
    lengths = [PROMPT, 1, 33]
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(320, (count,), generator=generator).tolist())

    batches = [
        Batch(tuple(Chunk(str(n), 0, tokens(lengths[n]), tables[n], None) for n in range(3)))
    ]
    batches += [
        Batch(
            tuple(
                Chunk(str(n), lengths[n] + step, tokens(1), tables[n], SampleSpec(None, step + 1))
                for n in range(3)
            )
        )
        for step in range(DECODED)
    ]
    for batch in batches:
        expected = logits(exact, batch)
        scale = expected.abs().max()
        torch.testing.assert_close(
            logits(fast, batch) / scale, expected / scale, rtol=0, atol=tolerance
        )
    for runner in (exact, fast):
        runner.close()


@pytest.fixture(params=PANEL_DTYPES)
def joined(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ModelRunner]:
    """A model whose three layers run as one call."""
    runner = load_runner(make_tiny_model(tmp_path, "qwen2", **FITTING), request.param)
    assert has_joined_layers(runner)
    yield runner
    runner.close()


BATCH = Batch(
    (
        Chunk("a", 0, tuple(range(70)), tuple(range(5)), None),
        Chunk("b", 3, (7,), (5,), SampleSpec(None, 1)),
        Chunk("c", 0, tuple(range(9)), (6,), None),
    )
)


def test_joined_layers_equal_single_layers_bitwise(
    joined: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = run_layers(joined, BATCH)
    monkeypatch.setattr(joined.decoder, "layer_runner", None)
    assert torch.equal(run_layers(joined, BATCH), together)


def test_joined_layers_do_not_modify_their_input(joined: ModelRunner) -> None:
    """Hidden states may lie in another stage's message, and a layer's input may be reused."""
    hidden = torch.randn(1, joined.geometry.hidden_size)
    given, batch = hidden.clone(), Batch((Chunk("a", 0, (1,), (0,), None),))
    with torch.inference_mode():
        joined.decoder.run_layers(hidden, torch.tensor([0]), joined.metadata(batch), range(3))
    assert torch.equal(hidden, given)


def test_a_callable_interrupt_is_checked_before_each_layer(joined: ModelRunner) -> None:
    asked: list[int] = []
    expected = run_layers(joined, BATCH)
    assert torch.equal(run_layers(joined, BATCH, lambda: bool(asked.append(0))), expected)
    assert len(asked) == 3
    with pytest.raises(Interrupted):
        run_layers(joined, BATCH, lambda: True)


def test_a_watched_interrupt_is_checked_when_data_arrives(joined: ModelRunner) -> None:
    """It is checked once before all layers, then before each layer while there is data to read."""
    asked: list[int] = []
    reading, writing = os.pipe()
    expected = run_layers(joined, BATCH)
    watched = WatchedInterrupt(lambda: bool(asked.append(0)), reading)
    assert torch.equal(run_layers(joined, BATCH, watched), expected)
    assert len(asked) == 1
    os.write(writing, b"!")
    assert torch.equal(run_layers(joined, BATCH, watched), expected)
    assert len(asked) == 1 + 3
    ended = WatchedInterrupt(lambda: len(asked) == 1 + 3 + 2 or watched(), reading)
    with pytest.raises(Interrupted):
        run_layers(joined, BATCH, ended)
    assert len(asked) == 1 + 3 + 2
    os.close(reading)
    os.close(writing)


def test_a_watched_interrupt_is_checked_again_while_its_answer_may_change(
    joined: ModelRunner,
) -> None:
    """No data arrives: it is checked before each layer from the first that requests it."""
    asked: list[int] = []
    reading, writing = os.pipe()
    expected = run_layers(joined, BATCH)
    patient = WatchedInterrupt(lambda: bool(asked.append(0)), reading, lambda: True)
    assert torch.equal(run_layers(joined, BATCH, patient), expected)
    assert len(asked) == 3
    ended = WatchedInterrupt(lambda: len(asked) == 3 + 2 or patient(), reading, lambda: True)
    with pytest.raises(Interrupted):
        run_layers(joined, BATCH, ended)
    assert len(asked) == 3 + 2
    os.close(reading)
    os.close(writing)
