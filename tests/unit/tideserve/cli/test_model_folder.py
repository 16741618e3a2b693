import json
import struct
from pathlib import Path

import pytest

from services.common.manifest import MANIFEST_NAME, write_manifest
from tideserve.cli import model_folder
from tideserve.cli.model_folder import (
    ModelUnavailable,
    check_memory,
    check_model_folder,
    damaged_files,
)


def make_weights(size_bytes: int) -> bytes:
    """A safetensors file with one tensor of `size_bytes` zeros."""
    entry = {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": entry}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(size_bytes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(make_weights(64))
    write_manifest(tmp_path)
    return tmp_path


def test_an_unchanged_folder_is_intact(folder: Path) -> None:
    assert damaged_files(folder) == []
    assert damaged_files(folder, thorough=True) == []


def test_the_manifest_has_the_format_of_sha256sum(folder: Path) -> None:
    lines = (folder / MANIFEST_NAME).read_text().splitlines()
    assert [line[64:] for line in lines] == [
        "  config.json",
        "  model.safetensors",
        "  tokenizer.json",
    ]


def test_a_changed_or_missing_small_file_is_detected(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    assert damaged_files(folder) == ["config.json", "tokenizer.json"]


def test_weights_are_checked_by_size_and_read_only_thoroughly(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "HASHED_BYTES_MAX", 32)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"\x01")
    assert "model.safetensors" not in damaged_files(folder)
    assert damaged_files(folder, thorough=True) == ["model.safetensors"]
    weights.write_bytes(whole[:-1])
    assert "model.safetensors" in damaged_files(folder)


@pytest.mark.parametrize("head", [b"", b"\xff" * 64, struct.pack("<Q", 2) + b"[]" + bytes(64)])
def test_weights_with_a_broken_header_are_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    monkeypatch.setattr(model_folder, "HASHED_BYTES_MAX", -1)
    (folder / "model.safetensors").write_bytes(head)
    assert "model.safetensors" in damaged_files(folder)


@pytest.mark.parametrize("text", [b"", b"nonsense\n", b"\xff\xfe", b"0" * 64 + b"  ../outside\n"])
def test_an_unreadable_manifest_is_damage(folder: Path, text: bytes) -> None:
    (folder / MANIFEST_NAME).write_bytes(text)
    assert damaged_files(folder) == [MANIFEST_NAME]


def test_a_complete_folder_can_be_served(folder: Path) -> None:
    check_model_folder(folder)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "config.json"),
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "weig"),
    ],
)
def test_missing_files_are_named(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelUnavailable, match=message):
        check_model_folder(folder)


def test_dummy_weights_need_no_weight_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    check_model_folder(folder, load_format="dummy")


def test_a_model_with_custom_code_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    with pytest.raises(ModelUnavailable, match="auto_map"):
        check_model_folder(folder)


@pytest.mark.parametrize("text", ["not json", "[]"])
def test_a_non_object_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelUnavailable):
        check_model_folder(folder)


def header_of(shapes: dict[str, list[int]]) -> bytes:
    """A safetensors file without its data, which is not read here."""
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for name, shape in shapes.items()
    }
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(("dtype", "parameters_mib"), [("bfloat16", 6), ("float32", 12)])
def test_memory_below_the_parameters_is_refused(
    folder: Path, dtype: str, parameters_mib: int
) -> None:
    layer = {"model.layers.0.w": [1024, 1024], "model.norm.weight": [1]}
    (folder / "model.safetensors").write_bytes(header_of(layer | {"lm_head.weight": [2**40]}))
    (folder / "more.safetensors").write_bytes(header_of({"model.layers.1.w": [2, 2**20]}))
    check_memory(folder, (parameters_mib << 20) + 8, dtype)
    with pytest.raises(ModelUnavailable, match=f"{parameters_mib + 1} MiB in {dtype}. Raise --mem"):
        check_memory(folder, parameters_mib << 20, dtype)


def test_damaged_weights_are_not_checked_at_the_start(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    check_memory(folder, 1, "float32")


def test_a_too_deeply_nested_config_is_a_short_error(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000 + "]" * 100_000)
    with pytest.raises(ModelUnavailable, match=r"config\.json is not valid JSON .*recursion"):
        check_model_folder(folder)
