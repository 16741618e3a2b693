"""The supported architectures, and the reading of a model folder's configuration.

Nothing in a model folder is ever executed: `auto_map` and pickle are refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.worker.errors import ModelError

ARCHITECTURES = {
    "LlamaForCausalLM": "LlamaForCausalLM",
    "MistralForCausalLM": "MistralForCausalLM",
    "Qwen2ForCausalLM": "Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "Qwen3ForCausalLM",
}
"""Name in `config.json` → class of `transformers`. They share one shape: `model.embed_tokens`,
`model.layers`, `model.norm`, `model.rotary_emb`, `lm_head`."""


_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
)
_ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
# The exceptions of transformers' checks and model code on a bad configuration.
_CONFIG_ERRORS = (
    *(StrictDataclassError, TypeError, ValueError, LookupError, AttributeError),
    *(ArithmeticError, AssertionError, RuntimeError),
)


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The sizes of a model. `max_model_len` counts prompt and output tokens."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    tied_embeddings: bool
    dtype: torch.dtype
    sliding_windows: tuple[int | None, ...]
    """Per layer: how many last positions a token sees, itself included; None for all of them."""

    @property
    def kv_bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def load_config(model_dir: Path) -> transformers.PretrainedConfig:
    """Read and check `config.json`. Raises ModelError."""
    path = model_dir / "config.json"
    raw = _read_json(path)
    if raw is None:
        raise ModelError(f"{path} does not exist; name a folder with a model in it")
    names = raw.get("architectures")
    if names not in [[name] for name in ARCHITECTURES]:
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
    _check_sizes(raw, path)
    try:
        config = _model_class(names[0]).config_class.from_dict(raw)
    except _CONFIG_ERRORS as error:
        raise ModelError(f"{path} is invalid ({_cause(error)}); fetch the model again") from error
    _check_choices(config, path)
    return config


def geometry_of(config: transformers.PretrainedConfig, dtype: torch.dtype) -> ModelGeometry:
    """The sizes of the model that `config` describes, served in `dtype`."""
    return ModelGeometry(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        tied_embeddings=bool(config.tie_word_embeddings),
        dtype=dtype,
        sliding_windows=_sliding_windows(config),
    )


def build_skeleton(config: transformers.PretrainedConfig, attention: str) -> nn.Module:
    """The model code without weights (on the meta device), using `attention` by its name.

    Raises ModelError.
    """
    config._attn_implementation = attention
    try:
        with torch.device("meta"):
            return _model_class(config.architectures[0])(config).eval()
    except _CONFIG_ERRORS as error:
        raise ModelError(
            f"no model can be built from config.json ({_cause(error)}); fetch the model again"
        ) from error


def _check_sizes(raw: dict[str, Any], path: Path) -> None:
    """Raise ModelError on a size below 1; `from_dict` checks types and presence."""
    for key in _SIZES:
        size = raw.get(key)
        if isinstance(size, int) and size < 1:
            raise ModelError(
                f"{path}: {key} is {size}, but must be at least 1; fetch the model again"
            )


def _check_choices(config: transformers.PretrainedConfig, path: Path) -> None:
    """Raise ModelError on names that `from_dict` accepts and the model code does not know."""
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    for key, name, known in (
        ("hidden_act", config.hidden_act, tuple(ACT2FN)),
        ("rope_type", rope_type, _ROPE_TYPES),
    ):
        if name not in known:
            raise ModelError(
                f"{path}: {key} {name!r} is not supported; choose a model with one of "
                + ", ".join(sorted(known))
            )
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ModelError(
            f"{path}: {heads} attention heads cannot share {kv_heads} KV heads evenly; "
            "fetch the model again"
        )


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _model_class(architecture: str) -> Any:
    return getattr(transformers, ARCHITECTURES[architecture])


def _sliding_windows(config: transformers.PretrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, as the attention of the architecture reads it."""
    match config.model_type:
        case "llama":
            return (None,) * config.num_hidden_layers
        case "mistral":
            return (config.sliding_window,) * config.num_hidden_layers
        case _:
            return tuple(
                config.sliding_window if kind == "sliding_attention" else None
                for kind in config.layer_types
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file does not exist. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object; fetch the model again")
    return value
