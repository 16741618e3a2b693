"""Unusable model folders and budgets fail with one sentence, before memory is reserved."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.errors import BudgetTooSmall, WorkerError
from tests.support.tiny_models import make_tiny_model

MIB = 2**20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def load(folder: Path, budget_bytes: int = 64 * MIB, device: str = "cpu") -> ModelRunner:
    return ModelRunner.load(RunnerConfig(folder, device, torch.float64, budget_bytes))


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def garble(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def write_manifest_of_another_encoding(folder: Path) -> None:
    (folder / "SHA256SUMS").write_bytes(b"\xff\xfe0\x000\x00")


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors"),
        (garble, "model.safetensors"),
        (only_a_pickle, "safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (edit_config(hidden_size=128), "shape"),
        (edit_config(num_hidden_layers=4), "layers.3"),
        (edit_config(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (edit_config(auto_map={"AutoModel": "x.Y"}), "auto_map"),
        (edit_config(architectures=5), "architecture 5 is not supported"),
        (edit_config(num_attention_heads=0), "num_attention_heads is 0, but must be 1 to"),
        (edit_config(num_hidden_layers=0), "num_hidden_layers is 0"),
        (edit_config(num_key_value_heads=0), "num_key_value_heads is 0"),
        (edit_config(num_key_value_heads=3), "3 KV heads evenly"),
        (edit_config(head_dim=-4), "head_dim is -4"),
        (edit_config(max_position_embeddings=0), "max_position_embeddings is 0"),
        (edit_config(hidden_act="zork"), "hidden_act 'zork' is not supported; choose .* silu"),
        (edit_config(rope_parameters={"rope_type": "zork"}), "rope_type 'zork' is not .* llama3"),
        (edit_config(rope_scaling={"type": "zork", "factor": 2.0}), "rope_type 'zork'"),
        (edit_config(rope_parameters={"rope_type": ["x"]}), "rope_type"),
        (write_manifest_of_another_encoding, "SHA256SUMS cannot be read .* write a new manifest"),
    ],
)
def test_a_damaged_folder(
    tiny: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "model")
    damage(folder)
    with pytest.raises(WorkerError, match=message):
        load(folder)


def test_a_missing_device(tiny: Path) -> None:
    with pytest.raises(WorkerError, match=r"CPU-only build|no GPU"):
        load(tiny, device="cuda:99")


def test_the_requested_memory_suffices(tiny: Path) -> None:
    with pytest.raises(BudgetTooSmall) as raised:
        load(tiny, budget_bytes=MIB)
    runner = load(tiny, budget_bytes=raised.value.needed_bytes)
    assert runner.num_blocks > 0
    runner.close()
