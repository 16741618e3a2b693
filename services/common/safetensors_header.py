"""The header of a file of safetensors: which tensors it has. Standard library only."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

HEADER_BYTES_MAX = 100 * 2**20
DAMAGED = (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error)
"""What `read_header` and readers of its entries raise if the file is none of safetensors."""


class SafetensorsHeader(NamedTuple):
    """Its length in the file, and its entries by the name of the tensor."""

    length_bytes: int
    tensors: Mapping[str, Mapping[str, Any]]


def read_header(path: Path) -> SafetensorsHeader:
    """The header of the file; raises one of `DAMAGED`."""
    with path.open("rb") as file:
        (length_bytes,) = struct.unpack("<Q", file.read(8))
        if length_bytes > HEADER_BYTES_MAX:
            raise ValueError("a header of that size is damage")
        header = json.loads(file.read(length_bytes))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return SafetensorsHeader(8 + int(length_bytes), tensors)
