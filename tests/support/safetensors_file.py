"""Writes the header of a safetensors file with one tensor."""

import json
from collections.abc import Sequence
from pathlib import Path


def write_safetensors(path: Path, shape: Sequence[int]) -> None:
    """Write the header; the data is missing."""
    header = json.dumps({"__metadata__": {}, "w": {"dtype": "BF16", "shape": list(shape)}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
