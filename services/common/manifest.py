"""Reads and writes `SHA256SUMS` of a model folder, in the format of `sha256sum`.

Standard library only, because the set-up uses it before any package is installed.
"""

import hashlib
import re
from pathlib import Path

MANIFEST_NAME = "SHA256SUMS"

# A digest, a space, a space or binary mode's *, and the name of a file in the same folder.
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *]([^/\0]+)")


def read_manifest(folder: Path) -> list[tuple[str, str]]:
    """Pairs of digest and file name.

    Raises:
        OSError: if the manifest cannot be read.
        ValueError: for a malformed line, a name outside the folder, or text that is not UTF-8.
    """
    entries = []
    for line in (folder / MANIFEST_NAME).read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[2] in (".", ".."):
            raise ValueError(f"{line[:100]!r} is not a line of sha256sum for a file in this folder")
        entries.append((match[1].lower(), match[2]))
    return entries


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files in `folder`. Raises OSError."""
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST_NAME)
    lines = [f"{file_digest(folder / name)}  {name}\n" for name in names]
    (folder / MANIFEST_NAME).write_text("".join(lines), encoding="utf-8")


def file_digest(path: Path) -> str:
    """The SHA-256 of a file in hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
