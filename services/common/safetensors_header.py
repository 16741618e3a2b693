"""Reads the header of a safetensors file, which lists its tensors. Standard library only."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HEADER_BYTES_MAX = 100 * 2**20
DAMAGED = (
    *(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError),
    struct.error,
)
"""Exceptions that `read_header`, or code that reads its entries, raises for an invalid file."""


class SafetensorsHeader(NamedTuple):
    """Length of the header with its 8-byte prefix, and its entries by tensor name."""

    length_bytes: int
    tensors: Mapping[str, Mapping[str, Any]]


def read_header(path: Path) -> SafetensorsHeader:
    """The header of a safetensors file; raises one of `DAMAGED`."""
    with path.open("rb") as file:
        (length_bytes,) = struct.unpack("<Q", file.read(8))
        # Check the length first: a damaged length would make `read` allocate gigabytes.
        if length_bytes > HEADER_BYTES_MAX:
            raise ValueError("the header is too large: the file is damaged")
        header = json.loads(file.read(length_bytes))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return SafetensorsHeader(8 + int(length_bytes), tensors)
