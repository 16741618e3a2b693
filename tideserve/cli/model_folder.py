"""What a model folder must hold, and whether its files are still those that were written.

Standard library only, and cheap enough for every start: the weights are not read.
"""

import json
from pathlib import Path

from services.common.manifest import MANIFEST_NAME, file_digest, read_manifest
from services.common.safetensors_header import DAMAGED, read_header

# Files up to this size are hashed at every start; above it (weights) only the length is checked.
HASHED_BYTES_MAX = 16 * 2**20
DUMMY = "dummy"


class ModelUnavailable(Exception):
    """No model can be served from the argument; the text says why and what to do."""


def damaged_files(folder: Path, thorough: bool = False) -> list[str]:
    """The names in `folder`'s manifest whose files are not what was written.

    Without a readable manifest the manifest itself is the damaged file. `thorough` hashes the
    weights too; otherwise they are compared with the length that their own header gives.
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

    `load_format` "dummy" makes up the weights, so none need to be there.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise ModelUnavailable(
            f"{folder} is not a model folder: its config.json cannot be read ({error.strerror})."
            " Pass the folder that holds config.json, tokenizer.json and *.safetensors."
        ) from error
    except ValueError as error:
        raise ModelUnavailable(
            f"{folder / 'config.json'} is not valid JSON ({error}). Download the model again."
        ) from error
    if not isinstance(config, dict):
        raise ModelUnavailable(
            f"{folder / 'config.json'} is not a JSON object. Download the model again."
        )
    if "auto_map" in config:
        raise ModelUnavailable(
            f"{folder / 'config.json'} asks to run code that comes with the model (auto_map),"
            " which tideserve never does. Choose a model whose architecture transformers knows."
        )
    if not (folder / "tokenizer.json").is_file():
        raise ModelUnavailable(
            f"{folder} has no tokenizer.json. Save the tokenizer once with transformers"
            " (AutoTokenizer.from_pretrained(...).save_pretrained(...)) and try again."
        )
    if load_format != DUMMY and not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(
            f"{folder} has no *.safetensors weights, the only format that is read."
            " Save the model once with transformers' save_pretrained and try again."
        )


def _is_intact(path: Path, digest: str, thorough: bool) -> bool:
    try:
        if thorough or path.stat().st_size <= HASHED_BYTES_MAX:
            return file_digest(path) == digest
        return path.stat().st_size == _safetensors_size_bytes(path)
    except DAMAGED:
        return False


def _safetensors_size_bytes(path: Path) -> int:
    """The length that a safetensors file's header says it has."""
    header = read_header(path)
    ends = [entry["data_offsets"][1] for entry in header.tensors.values()]
    return header.length_bytes + max(ends, default=0)
