"""Checks that a model folder is complete and undamaged.

Uses the standard library only and is fast enough for every start: weights are not read.
"""

import json
import math
from pathlib import Path

from services.common.manifest import MANIFEST_NAME, file_digest, read_manifest
from services.common.safetensors_header import DAMAGED, read_header

# Files up to this size are hashed at every start; above it (weights) only the length is checked.
HASHED_BYTES_MAX = 16 * 2**20
DUMMY = "dummy"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}


class ModelUnavailable(Exception):
    """The model cannot be served; the message states cause and remedy."""


def damaged_files(folder: Path, thorough: bool = False) -> list[str]:
    """Names of the files in `folder` that differ from its manifest.

    A missing or unreadable manifest counts as the damaged file. `thorough` hashes the weights as
    well; otherwise only their length is compared with their header.
    """
    try:
        entries = read_manifest(folder)
    except (OSError, ValueError):
        return [MANIFEST_NAME]
    if not entries:
        return [MANIFEST_NAME]
    return [name for digest, name in entries if not _is_intact(folder / name, digest, thorough)]


def check_model_folder(folder: Path, load_format: str = "auto") -> None:
    """Raise `ModelUnavailable` unless `folder` can be served without running code from it.

    With `load_format` "dummy", the weights are random and no weight files are needed.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise ModelUnavailable(
            f"{folder} is not a model folder: its config.json cannot be read ({error.strerror})."
            " Pass the folder that holds config.json, tokenizer.json and *.safetensors."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelUnavailable(
            f"{folder / 'config.json'} is not valid JSON ({error}). Download the model again."
        ) from error
    if not isinstance(config, dict):
        raise ModelUnavailable(
            f"{folder / 'config.json'} is not a JSON object. Download the model again."
        )
    if "auto_map" in config:
        raise ModelUnavailable(
            f"{folder / 'config.json'} requires code of the model (auto_map), which tideserve never"
            " runs. Choose a model whose architecture is part of transformers."
        )
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(
            f"{folder} has no tokenizer.json. Save the tokenizer once with transformers"
            " (AutoTokenizer.from_pretrained(...).save_pretrained(...)) and try again."
        )
    if load_format != DUMMY and not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(
            f"{folder} has no *.safetensors weights, the only supported format."
            " Save the model once with transformers' save_pretrained and try again."
        )


def check_memory(folder: Path, memory_bytes: int, dtype: str) -> None:
    """Raise `ModelUnavailable` if the parameters alone exceed the memory of a worker.

    The worker's own check includes staging buffers and KV cache, but it runs after seconds.
    """
    try:
        shapes = [
            entry["shape"]
            for path in folder.glob("*.safetensors")
            for name, entry in read_header(path).tensors.items()
            # Not an output layer, which may be a copy of a tied embedding.
            if name.startswith("model.")
        ]
        parameter_bytes = DTYPE_BYTES[dtype] * sum(map(math.prod, shapes))
    except DAMAGED:
        # The worker's error names the damaged file.
        return
    if parameter_bytes > memory_bytes:
        raise ModelUnavailable(
            f"a worker with {memory_bytes >> 20} MiB of memory cannot hold {folder.name}, whose"
            f" parameters take {-(-parameter_bytes >> 20)} MiB in {dtype}. Raise --memory to at"
            " least that, plus room for KV cache."
        )


def _is_intact(path: Path, digest: str, thorough: bool) -> bool:
    try:
        if thorough or path.stat().st_size <= HASHED_BYTES_MAX:
            return file_digest(path) == digest
        return path.stat().st_size == _safetensors_size_bytes(path)
    except DAMAGED:
        return False


def _safetensors_size_bytes(path: Path) -> int:
    """The length of a safetensors file according to its header."""
    header = read_header(path)
    ends = [entry["data_offsets"][1] for entry in header.tensors.values()]
    return header.length_bytes + max(ends, default=0)
