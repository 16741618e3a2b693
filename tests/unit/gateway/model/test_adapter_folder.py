"""Folders of adapters that do not fit the model are refused before clients use them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.adapter_files import CONFIG, WEIGHTS, AdapterUnreadable, adapter_digest
from services.gateway.model.adapter_folder import read_adapter
from tests.support.tiny_adapters import make_tiny_adapter

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def write(tmp_path: Path, model_dir: Path, **config: Any) -> Path:
    return make_tiny_adapter(tmp_path / "adapter", model_dir, **config)


def test_a_compatible_adapter_is_accepted(tmp_path: Path, model_dir: Path) -> None:
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    folder = write(tmp_path, model_dir, rank=4, targets=targets)
    adapter = read_adapter(folder, model_dir)
    assert (adapter.rank, adapter.targets) == (4, tuple(sorted(targets)))
    assert adapter.digest == adapter_digest(folder)


def test_the_largest_rank_counts(tmp_path: Path, model_dir: Path) -> None:
    folder = write(tmp_path, model_dir, rank=4, rank_pattern={"q_proj": 8})
    assert read_adapter(folder, model_dir).rank == 8


def test_modules_of_other_architectures_are_left_to_the_engine(
    tmp_path: Path, model_dir: Path
) -> None:
    (model_dir / "config.json").write_text(json.dumps(MODEL | {"architectures": ["Other"]}))
    folder = write(tmp_path, model_dir)
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    assert read_adapter(folder, model_dir).targets == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "is not the configuration of a LoRA adapter"),
        ({"bias": "all"}, "has biases, which workers do not apply"),
        ({"use_dora": True}, "has DoRA"),
        ({"modules_to_save": ["lm_head"]}, "has whole modules"),
        ({"use_qalora": True}, "has QALoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "has block-diagonal LoRA"),
        ({"init_lora_weights": "pissa_niter_16"}, "for a model whose weights 'pissa_niter_16'"),
        ({"r": 0}, "must be positive integers"),
        ({"r": True}, "must be positive integers"),
        ({"rank_pattern": {"q_proj": "8"}}, "must be positive integers"),
        ({"r": 4}, "has rank 8, but the configuration says at most 4"),
    ],
)
def test_unsupported_adapter_configurations_are_refused(
    tmp_path: Path, model_dir: Path, config: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path, model_dir, **config)
    with pytest.raises(AdapterUnreadable, match=message):
        read_adapter(folder, model_dir)


NAME = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NAME.format(0, "A"): (8, 16)}, "maps 16 to 32 values, but that of the model"),
        ({NAME.format(0, "B"): (32, 4)}, "has no pair of matrices A and B of the same rank"),
        ({NAME.format(2, "A"): (8, 32), NAME.format(2, "B"): (32, 8)}, "which has 2 layers"),
        ({NAME.format(1, "B"): None}, "has no pair of matrices"),
        ({"base_model.model.lm_head.lora_A.weight": (8, 32)}, "no matrix of a decoder layer"),
        ({"lora_magnitude_vector": (8,)}, "no matrix of a decoder layer"),
    ],
)
def test_mismatched_tensors_are_refused(
    tmp_path: Path, model_dir: Path, change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    folder = write(tmp_path, model_dir)
    tensors = load_file(folder / WEIGHTS)
    for name, shape in change.items():
        tensors.pop(name, None)
        if shape is not None:
            tensors[name] = torch.zeros(shape)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(AdapterUnreadable, match=message):
        read_adapter(folder, model_dir)


def write_header(folder: Path, header: dict[str, Any]) -> None:
    data = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(data)) + data)


@pytest.mark.parametrize("shape", [["8", "32"], [[8], [32]], [8.0, 32.0], [None, 32], 8])
def test_invalid_tensor_shapes_are_refused(tmp_path: Path, model_dir: Path, shape: Any) -> None:
    folder = write(tmp_path, model_dir)
    write_header(folder, {NAME.format(0, part): {"shape": shape} for part in "AB"})
    with pytest.raises(AdapterUnreadable, match="is not a safetensors file"):
        read_adapter(folder, model_dir)


def test_a_layer_number_out_of_range_is_refused(tmp_path: Path, model_dir: Path) -> None:
    folder = write(tmp_path, model_dir)
    write_header(folder, {NAME.format("9" * 5000, "A"): {"shape": [8, 32]}})
    with pytest.raises(AdapterUnreadable, match="which is no matrix of a decoder layer"):
        read_adapter(folder, model_dir)


def test_damaged_or_empty_files_are_refused(tmp_path: Path, model_dir: Path) -> None:
    folder = write(tmp_path, model_dir)
    save_file({}, folder / WEIGHTS)
    with pytest.raises(AdapterUnreadable, match="has no tensors"):
        read_adapter(folder, model_dir)
    (folder / WEIGHTS).write_bytes(b"\x02\0\0\0\0\0\0\0no")
    with pytest.raises(AdapterUnreadable, match="is not a safetensors file"):
        read_adapter(folder, model_dir)
    (folder / CONFIG).write_text("{")
    with pytest.raises(AdapterUnreadable, match="is not JSON"):
        read_adapter(folder, model_dir)


def test_a_folder_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, model_dir)

    def digest(read: Path) -> str:
        adapter = adapter_digest(read)
        write(tmp_path, model_dir, seed=1)
        return adapter

    monkeypatch.setattr("services.gateway.model.adapter_folder.adapter_digest", digest)
    with pytest.raises(AdapterUnreadable, match="changed while it was read; retry"):
        read_adapter(folder, model_dir)
