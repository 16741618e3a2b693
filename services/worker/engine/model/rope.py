"""Rotary position embeddings (RoPE), with the frequency scaling of each supported type."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from services.worker.engine.model.config import ModelConfig

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": ("rope_theta",),
    "linear": ("rope_theta", "factor"),
    "llama3": ("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
    # These types use a module of `transformers`, whose import takes seconds.
    "dynamic": ("rope_theta", "factor"),
    "yarn": ("rope_theta", "factor"),
    "longrope": ("rope_theta",),
}
"""The required numeric options of each type."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A type of `ROPE_TYPES` and its options, with the names of `config.json`."""

    kind: str
    options: Mapping[str, Any]


class RotaryEmbedding(nn.Module):
    """Computes cosine and sine of the angles of each position; angles are in float32."""

    def __init__(self, frequencies: torch.Tensor) -> None:
        super().__init__()
        self._frequencies = frequencies

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, tokens] positions → two tensors [1, tokens, head_dim] in the dtype of `hidden`."""
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)


def rotary_of(config: "ModelConfig", device: torch.device) -> nn.Module:
    """Return the module that computes cosine and sine for a model's queries and keys."""
    rope = config.rope
    if rope.kind not in ("default", "linear", "llama3"):
        return _of_transformers(config).to(device)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / config.head_dim
    frequencies = 1.0 / rope.options["rope_theta"] ** exponents
    if rope.kind == "linear":
        frequencies = frequencies / rope.options["factor"]
    elif rope.kind == "llama3":
        frequencies = _stretched(frequencies, rope.options, config.max_position_embeddings)
    return RotaryEmbedding(frequencies.to(device))


def _stretched(
    frequencies: torch.Tensor, options: Mapping[str, Any], positions: int
) -> torch.Tensor:
    """Scale `frequencies` as Llama 3.1; `positions`: the trained context unless in `options`."""
    # Divide low frequencies by `factor`, keep high frequencies, and interpolate between them.
    trained = options.get("original_max_position_embeddings") or positions
    factor, low, high = (
        options[name] for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    wavelengths = 2 * math.pi / frequencies
    slow = frequencies / factor
    blend = (trained / wavelengths - low) / (high - low)
    between = (1 - blend) * slow + blend * frequencies
    chosen = torch.where(wavelengths > trained / low, slow, between)
    return torch.where(wavelengths < trained / high, frequencies, chosen)


def _of_transformers(config: "ModelConfig") -> nn.Module:
    """Return the module of `transformers`, for types with more complex frequencies."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
    rotary: nn.Module = LlamaRotaryEmbedding(
        LlamaConfig(
            rope_parameters={"rope_type": config.rope.kind} | dict(config.rope.options),
            **{name: getattr(config, name) for name in sizes},
        )
    )
    return rotary
