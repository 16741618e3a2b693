"""Reads the `config.json` of a model folder with the defaults of `transformers`.

No code in a model folder is ever executed: a config with `auto_map` is refused. Importing
`transformers` takes seconds, so the engine parses the file itself.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from services.core.request import CONTEXT_TOKENS_MAX, VOCAB_MAX
from services.worker.engine.model.activations import ACTIVATIONS
from services.worker.engine.model.rope import ROPE_TYPES, Rope
from services.worker.errors import ModelError

FETCH_AGAIN = "fetch the model again"
WINDOW = 4096
"""Default of `sliding_window`."""
LAYERS_MAX = 2**12
SIZE_MAX = 2**20
"""Bounds of the number of layers, and of widths and numbers of heads."""
FULL_LAYERS = 28
"""Default of `max_window_layers`: number of first layers with full attention."""


class Biases(NamedTuple):
    """Which linear projections of a layer have a bias."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model; most field names are those of `config.json`.

    `head_norms`: queries and keys are normalized per head. `sliding_windows`: per layer, the number
    of last positions that a token attends to, itself included; None for all positions.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    hidden_act: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    biases: Biases
    head_norms: bool
    sliding_windows: tuple[int | None, ...]
    rope: Rope


def load_config(model_dir: Path) -> ModelConfig:
    """Read and check `config.json`. Raises ModelError."""
    path = model_dir / "config.json"
    raw = _read_json(path)
    names = raw.get("architectures")
    if names not in [[name] for name in FAMILIES]:
        supported = ", ".join(sorted(FAMILIES))
        raise ModelError(
            f"{path}: architecture {names} is not supported; choose a model of {supported}"
        )
    if "auto_map" in raw:
        raise ModelError(
            f"{path}: auto_map refers to code in the model folder, which is never executed; "
            f"remove auto_map to use the built-in {names[0]}"
        )
    if raw.get("quantization_config"):
        raise ModelError(
            f"{path}: quantized weights are not supported; use an unquantized copy of the model"
        )
    return _ConfigFile(path, raw).config(names[0])


def _read_json(path: Path) -> dict[str, Any]:
    """Parse the JSON object in the file. Raises ModelError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; give the folder of a model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read ({error}); {FETCH_AGAIN}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; {FETCH_AGAIN}")
    return value


@dataclass(frozen=True, slots=True)
class _ConfigFile:
    """Reads and validates the fields of `config.json`. All methods raise ModelError."""

    path: Path
    raw: Mapping[str, Any]

    def config(self, architecture: str) -> ModelConfig:
        hidden, heads = self._size("hidden_size"), self._size("num_attention_heads")
        kv_heads = self._size("num_key_value_heads", heads)
        layers = self._size("num_hidden_layers", maximum=LAYERS_MAX)
        family = FAMILIES[architecture]
        if heads % kv_heads:
            raise ModelError(
                f"{self.path}: {heads} attention heads cannot share {kv_heads} KV heads evenly; "
                f"{FETCH_AGAIN}"
            )
        return ModelConfig(
            architecture=architecture,
            hidden_size=hidden,
            intermediate_size=self._size("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=self._size("head_dim", family.head_dim or hidden // heads),
            vocab_size=self._size("vocab_size", maximum=VOCAB_MAX),
            max_position_embeddings=self._size(
                "max_position_embeddings", maximum=CONTEXT_TOKENS_MAX
            ),
            hidden_act=self._choice("hidden_act", self.raw.get("hidden_act", "silu"), ACTIVATIONS),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            tie_word_embeddings=self._flag("tie_word_embeddings"),
            biases=self._biases(family),
            head_norms=family.head_norms,
            sliding_windows=self._windows(family, layers),
            rope=self._rope(),
        )

    def _biases(self, family: "_Family") -> Biases:
        if family.biases is not None:
            return family.biases
        attention = self._flag("attention_bias")
        return Biases(attention, attention, family.may_bias_mlp and self._flag("mlp_bias"))

    def _windows(self, family: "_Family", layers: int) -> tuple[int | None, ...]:
        if not family.has_windows:
            return (None,) * layers
        window = None
        if self._has("sliding_window"):
            window = self._size("sliding_window", WINDOW, CONTEXT_TOKENS_MAX)
        if not family.windows_by_layer:
            return (window,) * layers
        # Qwen models use the window only if the file enables it, and not in all layers.
        if not self._flag("use_sliding_window"):
            return (None,) * layers
        kinds = self.raw.get("layer_types")
        # Older files have a number of full-attention layers instead of a list of types.
        if kinds is None:
            full = self._whole("max_window_layers", FULL_LAYERS)
            return tuple(window if index >= full else None for index in range(layers))
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self._invalid(f"layer_types is not a list of {layers} names")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    def _rope(self) -> Rope:
        # `rope_scaling` is the name in files before transformers 5.
        given = self.raw.get("rope_scaling") or self.raw.get("rope_parameters") or {}
        if not isinstance(given, dict):
            raise self._invalid("rope_parameters is not an object")
        kind = self._choice(
            "rope_type", given.get("rope_type", given.get("type", "default")), ROPE_TYPES
        )
        options = {"rope_theta": self._number("rope_theta", 10_000.0)} | given
        bad = [name for name in ROPE_TYPES[kind] if not _is_positive(options.get(name))]
        if bad:
            raise self._invalid(f"rope of type {kind} requires a positive number for {bad[0]}")
        return Rope(kind, options)

    def _has(self, key: str) -> bool:
        return key not in self.raw or self.raw[key] is not None

    def _size(self, key: str, default: int | None = None, maximum: int = SIZE_MAX) -> int:
        size = self._whole(key, default)
        if not 1 <= size <= maximum:
            raise ModelError(
                f"{self.path}: {key} is {size}, but must be 1 to {maximum}; {FETCH_AGAIN}"
            )
        return size

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self._invalid(f"{key} is missing")
            return default
        # In Python, True is an int.
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._invalid(f"{key} is {value!r}, not an integer")
        return value

    def _number(self, key: str, default: float) -> float:
        value = self.raw.get(key, default)
        if not _is_positive(value):
            raise self._invalid(f"{key} is {value!r}, not a positive number")
        return float(value)

    def _flag(self, key: str) -> bool:
        value = self.raw.get(key, False)
        if not isinstance(value, bool):
            raise self._invalid(f"{key} is {value!r}, neither true nor false")
        return value

    def _choice(self, key: str, name: Any, known: Mapping[str, Any]) -> str:
        if not isinstance(name, str) or name not in known:
            raise ModelError(
                f"{self.path}: {key} {name!r} is not supported; choose a model with "
                + ", ".join(sorted(known))
            )
        return name

    def _invalid(self, problem: str) -> ModelError:
        return ModelError(f"{self.path} is invalid ({problem}); {FETCH_AGAIN}")


def _is_positive(value: Any) -> bool:
    """Whether a JSON value is a positive number; JSON of Python has NaN and Infinity, too."""
    return type(value) in (int, float) and 0 < value < math.inf


@dataclass(frozen=True, slots=True)
class _Family:
    """How to read the file of an architecture. `biases` None: the file says which exist."""

    biases: Biases | None = None
    may_bias_mlp: bool = False
    head_norms: bool = False
    head_dim: int | None = None
    has_windows: bool = True
    windows_by_layer: bool = True


FAMILIES = {
    "LlamaForCausalLM": _Family(may_bias_mlp=True, has_windows=False),
    "MistralForCausalLM": _Family(Biases(), windows_by_layer=False),
    "Qwen2ForCausalLM": _Family(Biases(qkv=True)),
    "Qwen3ForCausalLM": _Family(head_norms=True, head_dim=128),
}
