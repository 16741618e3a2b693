"""Layers, rotary embeddings and `config.json`, compared with `transformers`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from services.worker.engine.model.config import ModelConfig, load_config
from services.worker.engine.model.modules import Skeleton
from services.worker.engine.model.rope import ROPE_TYPES, rotary_of
from services.worker.errors import ModelError
from tests.support.transformers_attention import ATTENTION_NAME

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SIZES = {
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CLASSES),
    *((name, {"head_dim": 12}) for name in CLASSES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": None, "rms_norm_eps": 1e-2, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 7}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("qwen3", {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {},
    {"rope_theta": 500_000.0},
    {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 1e5},
    {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
    {
        "rope_theta": 5e5,
        "rope_scaling": LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 16},
    },
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 7.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 32,
        }
    },
]


class Spy:
    """Attention that depends on all of its inputs and records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[int | None, float]] = []

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


def model_and_config(
    folder: Path, model_type: str, options: dict[str, Any]
) -> tuple[Any, ModelConfig]:
    """A model of `transformers` with random weights, and our configuration of the same file."""
    raw = {"model_type": model_type, "architectures": [CLASSES[model_type]]} | SIZES | options
    (folder / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = ATTENTION_NAME
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double().eval(), load_config(
        folder
    )


@pytest.mark.parametrize(("model_type", "options"), OPTIONS)
@torch.inference_mode()
def test_layers_give_the_same_bits(
    tmp_path: Path, model_type: str, options: dict[str, Any]
) -> None:
    reference, config = model_and_config(tmp_path, model_type, options)
    skeleton = Skeleton(config)
    ours = {name: parameter.shape for name, parameter in skeleton.model.named_parameters()}
    reference_shapes = {
        name: parameter.shape for name, parameter in reference.model.named_parameters()
    }
    assert list(ours.items()) == list(reference_shapes.items())
    assert config.tie_word_embeddings == reference.config.tie_word_embeddings
    body = skeleton.model.to_empty(device="cpu").double()
    body.load_state_dict(reference.model.state_dict())
    hidden = torch.randn(1, 9, SIZES["hidden_size"], dtype=torch.float64)
    rotation = reference.model.rotary_emb(hidden, torch.arange(9)[None])
    for window, layer, other in zip(
        config.sliding_windows, body.layers, reference.model.layers, strict=True
    ):
        assert isinstance(layer, torch.nn.Module)
        got, wanted = Spy(), Spy()
        expected = other(hidden, position_embeddings=rotation, paged=wanted)
        actual = layer(hidden, position_embeddings=rotation, paged=got)
        assert torch.equal(actual, expected)
        assert got.asked == wanted.asked == [(window, config.head_dim**-0.5)]
        hidden = actual
    assert torch.equal(body.norm(hidden), reference.model.norm(hidden))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope", ROPES)
@torch.inference_mode()
def test_rotary_embeddings_equal_those_of_transformers(
    tmp_path: Path, rope: dict[str, Any], dtype: torch.dtype
) -> None:
    reference, config = model_and_config(tmp_path, "llama", rope)
    assert config.rope.kind == reference.config.rope_parameters["rope_type"]
    hidden, positions = torch.zeros(1, 50, 8, dtype=dtype), torch.arange(3, 53)[None]
    rotary = type(reference.model.rotary_emb)(reference.config)
    wanted = rotary(hidden, positions)
    got = rotary_of(config, torch.device("cpu"))(hidden, positions)
    assert all(torch.equal(actual, other) for actual, other in zip(got, wanted, strict=True))
    assert all(tensor.dtype == dtype for tensor in got)


def test_all_types_of_rotation_are_compared() -> None:
    named = [rope.get("rope_parameters", rope.get("rope_scaling", {})) for rope in ROPES]
    kinds = {settings.get("rope_type", settings.get("type", "default")) for settings in named}
    assert kinds == set(ROPE_TYPES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": True}, "hidden_size is True, not an integer"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps is 'x', not a positive number"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, not a positive number"),
        ({"rope_theta": 0}, "rope_theta is 0, not a positive number"),
        ({"rope_parameters": {"rope_theta": math.inf}}, "a positive number for rope_theta"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but must be 1 to 4096"),
        ({"hidden_size": 10**12}, "hidden_size is 1000000000000, but must be 1 to"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, but must be 1 to"),
        ({"max_position_embeddings": 10**18}, "max_position_embeddings is 10.*, but must be"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, neither true nor false"),
        ({"rope_scaling": [1]}, "rope_parameters is not an object"),
        (
            {"rope_scaling": {"type": "linear"}},
            "linear requires a positive number for factor",
        ),
        ({"use_sliding_window": True, "layer_types": ["x"]}, "is not a list of 3 names"),
        ({"use_sliding_window": True, "max_window_layers": 1.5}, "max_window_layers is 1.5"),
        ({"sliding_window": 0, "use_sliding_window": True}, "sliding_window is 0, but must"),
    ],
)
def test_invalid_configurations_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    raw = {"architectures": ["Qwen2ForCausalLM"]} | SIZES | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        load_config(tmp_path)


def test_a_too_deeply_nested_file_is_a_short_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelError, match=r"cannot be read .*recursion"):
        load_config(tmp_path)


def test_layers_with_windows_are_read_by_their_names(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    options = {"use_sliding_window": True, "layer_types": kinds}
    raw = {"architectures": ["Qwen2ForCausalLM"]} | SIZES | options
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert load_config(tmp_path).sliding_windows == (4096, None, 4096)
