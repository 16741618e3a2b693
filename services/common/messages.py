"""Messages of a child process over its standard input and output: a length, then bytes."""

import json
import resource
import struct
from collections.abc import Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

LENGTH = struct.Struct("!I")
"""Prefix of each message: its length in bytes."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Encode a message in JSON."""
    return encode_bytes(json.dumps(message).encode())


def encode_bytes(body: bytes) -> bytes:
    """Encode a message of bytes."""
    return LENGTH.pack(len(body)) + body


def read_message(source: RawIOBase) -> dict[str, Any] | None:
    """Read the next message, in JSON; None at the end of the input."""
    head = _read_exactly(source, LENGTH.size)
    body = head and _read_exactly(source, LENGTH.unpack(head)[0])
    if not body:
        return None
    message: dict[str, Any] = json.loads(body)
    return message


def _read_exactly(source: RawIOBase, count: int) -> bytes:
    """Read `count` bytes; empty if the input ends first."""
    data = bytearray()
    while len(data) < count:
        part = source.read(count - len(data))
        if not part:
            return b""
        data += part
    return bytes(data)


def limit_memory(more_bytes: int) -> None:
    """Let this process allocate at most `more_bytes` beyond the memory that it has."""
    # The sixth number is the memory that RLIMIT_DATA counts, in pages; see proc(5).
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
    limit_soft(resource.RLIMIT_DATA, pages * resource.getpagesize() + more_bytes)


def limit_soft(kind: int, limit: int) -> None:
    """Set the soft limit of a resource, at most to its hard limit, which stays."""
    _, hard = resource.getrlimit(kind)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(kind, (soft, hard))
