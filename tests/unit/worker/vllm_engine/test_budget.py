"""The division of a worker's memory between vLLM's parameters and its KV."""

from pathlib import Path

import pytest

from services.worker.errors import BudgetTooSmall, ModelError
from services.worker.vllm_engine.budget import LEAST_KV_BYTES, kv_bytes, parameter_bytes
from tests.support.safetensors_file import write_safetensors


def test_parameters_count_in_the_type_that_they_are_served_in(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model-1.safetensors", [25, 10])
    write_safetensors(tmp_path / "model-2.safetensors", [5])
    assert parameter_bytes(tmp_path, "bfloat16") == 2 * 255
    assert parameter_bytes(tmp_path, "float32") == 4 * 255


def test_missing_and_damaged_weights_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no .*safetensors weights"):
        parameter_bytes(tmp_path, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="is not a valid safetensors file"):
        parameter_bytes(tmp_path, "float32")


def test_remaining_memory_is_kv() -> None:
    assert kv_bytes(LEAST_KV_BYTES + 5, 5) == LEAST_KV_BYTES
    with pytest.raises(BudgetTooSmall, match=r"parameters take 1 MiB .* at least 17 MiB"):
        kv_bytes(LEAST_KV_BYTES, 1 << 20)
