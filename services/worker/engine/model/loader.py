"""Reads parameters from safetensors files, or generates seeded random weights.

A source fills a tensor at a time in the engine's memory, so loading needs no second copy of the
model.
"""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.common.manifest import MANIFEST_NAME, file_digest, read_manifest
from services.worker.errors import ModelError

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DUMMY_SLICE_ELEMENTS = 1 << 20


class SafetensorsSource:
    """The weights of a model folder: a safetensors file, or shards with an index."""

    on_device = False

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._path_of = _locate(model_dir)

    def fill(self, name: str, target: torch.Tensor) -> None:
        path = self._path_of.get(name)
        if path is None:
            raise ModelError(
                f"{self._model_dir} has no tensor {name}, which its config.json requires; "
                "fetch the model again"
            )
        try:
            tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{path} is corrupted ({error}); fetch the model again") from error
        if tensor.shape != target.shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(tensor.shape)} but config.json requires "
                f"{list(target.shape)}; fetch the model again"
            )
        target.copy_(tensor)

    def close(self) -> None:
        self._files.clear()
        self._stack.close()

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(_open_safetensors(path))
        return self._files[path]


class DummySource:
    """Random weights that depend only on `seed` and name, so all workers generate the same.

    Values are normal with standard deviation `std`; norm weights are 1. Weights on a GPU differ
    from weights on a CPU.
    """

    on_device = True

    def __init__(self, *, seed: int = 0, std: float = 0.02) -> None:
        self._seed = seed
        self._std = std

    def fill(self, name: str, target: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        generator = torch.Generator(target.device)
        generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        # Generate in slices, to bound the temporary memory for float32 values.
        for piece in target.view(-1).split(_DUMMY_SLICE_ELEMENTS):
            values = torch.randn(piece.shape, generator=generator, device=target.device)
            piece.copy_(values.mul_(self._std))

    def close(self) -> None:
        """No effect."""


def verify_manifest(model_dir: Path) -> None:
    """Check every file against the manifest `SHA256SUMS`, if it exists. Raises ModelError.

    A safetensors file that the manifest does not list is an error, too.
    """
    path = model_dir / MANIFEST_NAME
    if not path.exists():
        return
    try:
        entries = read_manifest(model_dir)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); write a new manifest") from error
    for digest, name in entries:
        file_path = model_dir / name
        if not file_path.is_file():
            raise ModelError(f"{path} lists {name}, which is missing; fetch the model again")
        try:
            matches = file_digest(file_path) == digest
        except OSError as error:
            raise ModelError(f"{file_path} cannot be read ({error}); make it readable") from error
        if not matches:
            raise ModelError(f"{file_path} does not match {MANIFEST_NAME}; fetch the model again")
    listed = {name for _, name in entries}
    for weights in sorted(model_dir.glob("*.safetensors")):
        if weights.name not in listed:
            raise ModelError(f"{path} does not list {weights.name}; write a new manifest")


def _locate(model_dir: Path) -> dict[str, Path]:
    """Map tensor names to their files. Raises ModelError."""
    index_path = model_dir / _INDEX_FILE
    if (model_dir / _SINGLE_FILE).exists():
        path = model_dir / _SINGLE_FILE
        with _open_safetensors(path) as file:
            return dict.fromkeys(file.keys(), path)
    if index_path.exists():
        return _locate_shards(model_dir, index_path)
    # Explain that pickled weights are refused, instead of reporting a missing file.
    if any(model_dir.glob("*.bin")) or any(model_dir.glob("*.pt")):
        raise ModelError(
            f"{model_dir} has only pickled weights, which can run code and are never loaded; "
            "convert the model to safetensors"
        )
    raise ModelError(f"{model_dir} has no {_SINGLE_FILE} and no {_INDEX_FILE}; fetch the model")


def _locate_shards(model_dir: Path, index_path: Path) -> dict[str, Path]:
    try:
        names = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        located = {str(tensor): model_dir / str(file) for tensor, file in names.items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index_path} cannot be read ({error}); fetch the model again") from error
    # An index may not refer to files outside the folder.
    for path in set(located.values()):
        if path.parent != model_dir or not path.is_file():
            raise ModelError(f"{index_path} names {path.name}, which is missing; fetch the model")
    return located


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is corrupted ({error}); fetch the model again") from error
