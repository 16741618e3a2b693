"""A fused layer, compared with the layer of `transformers` that it replaces."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from services.worker.engine.memory.panels import panels_of
from services.worker.engine.model.cpu_kernels.skinny_gemm import FEW_ROWS
from services.worker.engine.model.fused_layer import FusedLayer, fused_layer
from tests.support.panels import PANEL_DTYPES
from tests.support.transformers_attention import ATTENTION_NAME

EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
ODD = {"hidden_size": 39, "intermediate_size": 45, "num_attention_heads": 3, "head_dim": 6}
PANELS = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 64}
SMALL = {"hidden_size": 10, "intermediate_size": 7, "num_attention_heads": 2, "head_dim": 4}


@dataclass
class Mixing:
    """Attention that depends on all of its inputs and records its calls."""

    asked: list[tuple[int | None, float]] = field(default_factory=list)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        sliding_window: int | None,
        scaling: float,
    ) -> torch.Tensor:
        self.asked.append((sliding_window, scaling))
        share = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(share, 1) for tensor in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scaling
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).contiguous()


def layer_and_rotation(
    model_type: str, sizes: dict[str, int], dtype: torch.dtype, **options: Any
) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """A layer with parameters in `dtype`, its model, and these parameters."""
    config = AutoConfig.for_model(
        model_type, num_key_value_heads=1, num_hidden_layers=1, vocab_size=8, **sizes, **options
    )
    config._attn_implementation = ATTENTION_NAME
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, parameter in model.model.layers[0].named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.3
        stored[f"it.{name}"] = (drawn + name.endswith("norm.weight")).to(dtype)
        parameter.data = stored[f"it.{name}"].float()
    return model.model.layers[0], model.model, stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [EVEN, ODD, SMALL])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_fused_layer_equals_the_plain_layer(
    model_type: str, sizes: dict[str, int], dtype: torch.dtype
) -> None:
    window = 5 if model_type == "mistral" else None
    layer, model, stored = layer_and_rotation(model_type, sizes, dtype, sliding_window=window)
    fused = fused_layer(layer, stored, "it", model.config, sliding_window=window)
    assert isinstance(fused, FusedLayer)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 2, 3, 5, 16, 17, FEW_ROWS, FEW_ROWS + 1):
        hidden = torch.randn(1, rows, sizes["hidden_size"], generator=generator)
        rotation = model.rotary_emb(hidden, torch.arange(rows)[None] + 100)
        expected, actual = Mixing(), Mixing()
        wanted = layer(hidden, position_embeddings=rotation, paged=expected)
        got = fused(hidden, position_embeddings=rotation, paged=actual)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        assert actual.asked == expected.asked


def in_panels(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters with all weights of products in panels."""
    return {
        name: panels_of(weight).contiguous() if weight.dim() == 2 else weight
        for name, weight in stored.items()
    }


@pytest.mark.parametrize("dtype", PANEL_DTYPES)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
@torch.inference_mode()
def test_panels_equal_the_layer_with_rounded_inputs(model_type: str, dtype: torch.dtype) -> None:
    layer, model, stored = layer_and_rotation(model_type, PANELS, dtype)
    fused = fused_layer(layer, in_panels(stored), "it", model.config, sliding_window=None)
    assert isinstance(fused, FusedLayer)
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, rows: (rows[0].to(dtype).float(),))
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 2, 17, 64, 65, 130):
        hidden = torch.randn(1, rows, PANELS["hidden_size"], generator=generator)
        rotation = model.rotary_emb(hidden, torch.arange(rows)[None] + 100)
        wanted = layer(hidden, position_embeddings=rotation, paged=Mixing())
        got = fused(hidden, position_embeddings=rotation, paged=Mixing())
        if dtype == torch.float32:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
            continue
        # A sum in another order may round to the next bfloat16.
        error, size = (got - wanted).abs(), wanted.abs()
        assert error.max() < 2**-7 * size.max() and error.mean() < 2**-10 * size.mean()


@pytest.mark.parametrize("panel_dtype", [None, *PANEL_DTYPES])
@torch.inference_mode()
def test_a_row_does_not_depend_on_its_batch(panel_dtype: torch.dtype | None) -> None:
    sizes = EVEN if panel_dtype is None else PANELS
    # With panels so many that a weight is multiplied with a part of them at a time.
    count = FEW_ROWS if panel_dtype is None else 600
    layer, model, stored = layer_and_rotation("llama", sizes, panel_dtype or torch.float32)
    views = stored if panel_dtype is None else in_panels(stored)
    fused = fused_layer(layer, views, "it", model.config, sliding_window=None)
    hidden = torch.randn(count, sizes["hidden_size"])
    cosine, sine = (
        rotary[0] for rotary in model.rotary_emb(hidden[None], torch.arange(count)[None])
    )
    together = fused.kernel.before(hidden, cosine, sine)
    attended = torch.randn(count, 4, sizes["head_dim"])
    after = fused.kernel.after(hidden, attended)
    for row in range(0, count, 7):
        own = slice(row, row + 1)
        alone = fused.kernel.before(hidden[own], cosine[own], sine[own])
        assert all(torch.equal(a, b[own]) for a, b in zip(alone, together, strict=True))
        assert torch.equal(fused.kernel.after(hidden[own], attended[own]), after[own])


@pytest.mark.parametrize(
    "options", [{"attention_bias": True}, {"mlp_bias": True}, {"hidden_act": "gelu"}]
)
def test_unsupported_layers_are_not_fused(options: dict[str, Any]) -> None:
    layer, model, stored = layer_and_rotation("llama", EVEN, torch.float32, **options)
    assert fused_layer(layer, stored, "it", model.config, sliding_window=None) is layer


@torch.inference_mode()
def test_unsupported_inputs_are_refused() -> None:
    layer, model, stored = layer_and_rotation("llama", EVEN, torch.float32)
    kernel = fused_layer(layer, stored, "it", model.config, sliding_window=None).kernel
    turn = torch.ones(2, 16)
    with pytest.raises(ValueError, match="do not match this layer"):
        kernel.before(torch.ones(2, 63), turn, turn)
    with pytest.raises(ValueError, match="do not match this layer"):
        kernel.before(torch.ones(3, 64), turn, turn)
    with pytest.raises(ValueError, match="does not match this layer"):
        kernel.after(torch.ones(2, 64), torch.ones(2, 3, 16))
