"""Which models are served, and what a model folder says about its model.

Nothing from a model folder is ever executed: `auto_map` and pickle are refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from services.worker.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "Qwen3ForCausalLM",
}
"""Name in `config.json` → class of `transformers`. They share one shape: `model.embed_tokens`,
`model.layers`, `model.norm`, `model.rotary_emb`, `lm_head`."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of a model that others plan with. `max_model_len` counts prompt and output tokens."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tied_embeddings: bool
    dtype: torch.dtype
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many last positions a token sees, itself included; None for all of them."""

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def load_config(model_dir: Path) -> transformers.PretrainedConfig:
    """Read and check `config.json`. Raises ModelError."""
    path = model_dir / "config.json"
    raw = _read_json(path)
    if raw is None:
        raise ModelError(f"{path} does not exist; name a folder with a model in it")
    names = raw.get("architectures") or []
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{path}: architecture {names} is not supported; choose one of {supported}"
        )
    if "auto_map" in raw:
        raise ModelError(
            f"{path}: auto_map asks to run code from the model folder, which is never done; "
            f"remove it to use the built-in {names[0]}"
        )
    if raw.get("quantization_config"):
        raise ModelError(
            f"{path}: quantized weights are not supported; use an unquantized copy of the model"
        )
    try:
        return _model_class(names[0]).config_class.from_dict(raw)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        cause = " ".join(str(error).split())
        raise ModelError(f"{path} is invalid ({cause}); fetch the model again") from error


def geometry_of(
    model_dir: Path, config: transformers.PretrainedConfig, dtype: torch.dtype
) -> ModelGeometry:
    """The sizes of the model that `config` describes, served in `dtype`."""
    return ModelGeometry(
        architecture=config.architectures[0],
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(model_dir, config),
        tied_embeddings=bool(config.tie_word_embeddings),
        dtype=dtype,
        sliding_windows=_sliding_windows(config),
    )


def build_skeleton(config: transformers.PretrainedConfig, attention: str) -> nn.Module:
    """The model code without weights (on the meta device), using `attention` by its name."""
    config._attn_implementation = attention
    with torch.device("meta"):
        return _model_class(config.architectures[0])(config).eval()


def _model_class(architecture: str) -> Any:
    return getattr(transformers, ARCHITECTURES[architecture])


def _sliding_windows(config: transformers.PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _eos_token_ids(model_dir: Path, config: transformers.PretrainedConfig) -> frozenset[int]:
    """From `generation_config.json`, which wins, or the configuration."""
    generation = _read_json(model_dir / "generation_config.json") or {}
    ids = generation.get("eos_token_id", config.eos_token_id)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, None if there is no such file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; fetch the model again")
    return value
