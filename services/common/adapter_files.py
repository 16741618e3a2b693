"""The files of a LoRA adapter, in the format of peft: its configuration and its weights.

An adapter's folder may be written while it is read. So its digest is computed from the bytes that
are used: a worker copies the files, and loads the copy if it has the expected digest.
"""

import hashlib
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import BinaryIO

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
FILES = (CONFIG, WEIGHTS)
FILE_BYTES_MAX = {CONFIG: 2**20, WEIGHTS: 2**35}
_PIECE_BYTES = 2**20


class AdapterUnreadable(Exception):
    """The folder of an adapter cannot be used; the message has cause and remedy."""


class CopyFailed(Exception):
    """The copy of an adapter's files cannot be written; the message has cause and remedy."""


def folder_below(source: str, roots: Iterable[Path]) -> Path:
    """The folder at the absolute path `source`; it and its files must lie below one of `roots`.

    Raises:
        AdapterUnreadable: if they do not, links resolved.
    """
    path = Path(source)
    if not path.is_absolute():
        raise AdapterUnreadable(
            f"the adapter's folder '{source}' must be an absolute path; correct it"
        )
    try:
        resolved = path.resolve()
        below = [root.resolve() for root in roots]
        outside = [
            name
            for name in ("", *FILES)
            if not any((resolved / name).resolve().is_relative_to(root) for root in below)
        ]
    except (OSError, ValueError, RuntimeError) as error:  # a null character; a loop of links
        raise AdapterUnreadable(
            f"the adapter's folder cannot be resolved: {error}; correct its path"
        ) from error
    if "" in outside:
        raise AdapterUnreadable(
            f"the adapter's folder '{source}' is not below any of 'adapter_roots'; move it there"
        )
    if outside:
        raise AdapterUnreadable(
            f"{outside[0]} in '{source}' is a link to a file that is not below any of"
            " 'adapter_roots'; copy the file there"
        )
    return resolved


def adapter_digest(folder: Path, copy: Path | None = None) -> str:
    """SHA-256 over names, sizes and contents of both files; `copy` gets the bytes that were read.

    `copy` is an existing folder, or None.

    Raises:
        AdapterUnreadable: if a file cannot be read.
        CopyFailed: if `copy` cannot be written.
    """
    digest = hashlib.sha256()
    for name in FILES:
        try:
            _check_file(folder / name)
            with (folder / name).open("rb") as file:
                if copy is None:
                    content, size = _digest_of(file)
                else:
                    # Unbuffered: closing it must not fail.
                    with (copy / name).open("wb", buffering=0) as target:
                        content, size = _digest_of(file, target)
        except OSError as error:
            reason = error.strerror or error
            raise AdapterUnreadable(
                f"{name} of the adapter in {folder} cannot be read: {reason}; write the adapter in"
                " peft's format, with safetensors"
            ) from error
        digest.update(f"{name} {size} {content}\n".encode())
    return digest.hexdigest()


def _check_file(path: Path) -> None:
    status = path.stat()
    # Reading anything else may block.
    if not stat.S_ISREG(status.st_mode):
        raise OSError("it is not a regular file")
    if status.st_size > FILE_BYTES_MAX[path.name]:
        raise OSError(f"it is larger than {FILE_BYTES_MAX[path.name]} bytes")


def _digest_of(file: BinaryIO, target: FileIO | None = None) -> tuple[str, int]:
    """SHA-256 and size of the rest of `file`, which is written to `target`."""
    digest, size = hashlib.sha256(), 0
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
        size += len(piece)
        if target is not None:
            try:
                rest = memoryview(piece)
                while rest:
                    rest = rest[target.write(rest) :]
            except OSError as error:
                raise CopyFailed(
                    f"the adapter's files cannot be copied: {error.strerror or error}; free space"
                    " in the temporary folder"
                ) from error
    return digest.hexdigest(), size
