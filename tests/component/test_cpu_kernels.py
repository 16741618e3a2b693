"""Whole models over the compiled kernels: float32 and bfloat16 beside float64 without them."""

from pathlib import Path

import pytest
import torch

from services.core.groups.slab_names import EMBEDDING, layer_name
from services.core.planner.batch import Batch, Chunk
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.model.fused_layer import FusedLayer
from services.worker.engine.model.linear import SlabLinear
from tests.support.generation import load_runner
from tests.support.panels import needs_panel_product
from tests.support.tiny_models import make_tiny_model

PROMPT, DECODED = 21, 20


@torch.inference_mode()
def logits(runner: ModelRunner, batch: Batch) -> torch.Tensor:
    """Logits of the last token of each chunk, in float64."""
    tokens = torch.tensor([token for chunk in batch.chunks for token in chunk.token_ids])
    positions = [c.start + index for c in batch.chunks for index in range(len(c.token_ids))]
    decoder = runner.decoder
    hidden = decoder.run_layers(
        decoder.embed(tokens),
        torch.tensor(positions),
        runner.metadata(batch),
        range(runner.geometry.num_layers),
    )
    ends = torch.tensor([len(chunk.token_ids) for chunk in batch.chunks]).cumsum(0) - 1
    return decoder.logits(hidden[ends]).double()


def uses_kernels(runner: ModelRunner) -> bool:
    layers = runner.decoder._layers
    modules = [module for layer in layers for module in layer.modules()]
    products = [one for one in modules if isinstance(one, SlabLinear)]
    assert products
    return all(isinstance(layer, FusedLayer) for layer in layers) and all(
        one._compiled is not None for one in products
    )


def uses_panels(runner: ModelRunner) -> bool:
    return all(runner.stage_memory.slabs[name].layout.tag for name in (layer_name(0), EMBEDDING))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "tolerance", "panels"),
    [
        (torch.float32, 1e-4, False),
        (torch.bfloat16, 0.1, False),
        pytest.param(torch.bfloat16, 0.1, True, marks=needs_panel_product),
    ],
)
def test_logits_are_those_of_float64(
    architecture: str, dtype: torch.dtype, tolerance: float, panels: bool, tmp_path: Path
) -> None:
    """A prompt, then decoding of three sequences at once, their contexts of different lengths."""
    options = {"sliding_window": 13} if architecture == "mistral" else {}
    if panels:  # every weight fits, also that of the head, which looks tokens up as well
        options |= {"hidden": 128, "heads": 2, "kv_heads": 1, "tie_word_embeddings": True}
    model_dir = make_tiny_model(tmp_path, architecture, vocab=320, norm_std=0.3, **options)
    exact, fast = load_runner(model_dir), load_runner(model_dir, dtype)
    assert uses_kernels(fast) and not uses_kernels(exact)
    assert uses_panels(fast) is panels
    tables = [tuple(range(first, first + 4)) for first in (0, 4, 8)]
    lengths = [PROMPT, 1, 33]
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(320, (count,), generator=generator).tolist())

    batches = [
        Batch(tuple(Chunk(str(n), 0, tokens(lengths[n]), tables[n], None) for n in range(3)))
    ]
    batches += [
        Batch(tuple(Chunk(str(n), lengths[n] + step, tokens(1), tables[n], None) for n in range(3)))
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
