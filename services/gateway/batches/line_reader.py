"""Splits the input of a batch into lines, whatever their length."""

from collections.abc import Iterator
from dataclasses import dataclass

from services.gateway.batches.object_store import ObjectSource

LINE_BYTES_MAX = 10**6
"""Maximum length of a line without its end."""
READ_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line: `number` from 1, its `offset` in the file, and its bytes without the newline.

    `content` None: it exceeds `LINE_BYTES_MAX`. `ended`: a newline follows it.
    """

    number: int
    offset: int
    content: bytes | None
    ended: bool


def read_lines(source: ObjectSource) -> Iterator[RawLine]:
    """The lines of an object, of which at most one and a piece are in memory."""
    number, offset = 1, 0
    # Length of the line so far; its pieces, unless it is too long.
    length, pieces = 0, list[bytes]()
    while data := source.read(READ_BYTES):
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            content = _joined(pieces, data[start:end], length)
            yield RawLine(number, offset, content, ended=True)
            offset += length + end - start + 1
            number, length, pieces = number + 1, 0, []
            start = end + 1
        rest = data[start:]
        if length <= LINE_BYTES_MAX:
            pieces.append(rest)
        length += len(rest)
    if length:
        yield RawLine(number, offset, _joined(pieces, b"", length), ended=False)


def _joined(pieces: list[bytes], last: bytes, length: int) -> bytes | None:
    return b"".join([*pieces, last]) if length + len(last) <= LINE_BYTES_MAX else None
