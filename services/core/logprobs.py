"""Log probabilities of consecutive tokens, packed: many numbers that are carried, seldom read."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from services.core.request import TokenLogprobs

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """A row for each token: how likely it was, and the `top` most likely ones.

    `ids` holds little-endian int32 [rows, 1 + top]: the token's rank, from 1, and then the ids of
    the most likely tokens, best first. `values` holds float32 of the same shape: the token's own
    log probability, and then theirs.
    """

    top: int
    ids: bytes = b""
    values: bytes = b""

    def __len__(self) -> int:
        return len(self.values) // self._row_bytes

    def __add__(self, other: "LogprobRows") -> "LogprobRows":
        """The rows of both parts, which have the same `top`."""
        return joined((self, other))

    def rows(self, first: int, end: int | None = None) -> "LogprobRows":
        """The rows from `first` to before `end`, as a slice of a list has them."""
        first, end, _ = slice(first, end).indices(len(self))
        part = slice(first * self._row_bytes, max(first, end) * self._row_bytes)
        return LogprobRows(self.top, self.ids[part], self.values[part])

    def unpacked(self) -> list[TokenLogprobs]:
        """The rows as numbers."""
        width = 1 + self.top
        ids = struct.unpack(f"<{len(self) * width}i", self.ids)
        values = struct.unpack(f"<{len(self) * width}f", self.values)
        pairs = tuple(zip(ids, values, strict=True))
        return [
            TokenLogprobs(values[start], ids[start], pairs[start + 1 : start + width])
            for start in range(0, len(pairs), width)
        ]

    @property
    def _row_bytes(self) -> int:
        return _ITEM_BYTES * (1 + self.top)


def packed(top: int, rows: Iterable[TokenLogprobs]) -> LogprobRows:
    """The rows as bytes; each has `top` tokens beside its own."""
    ids, values = bytearray(), bytearray()
    for row in rows:
        ids += struct.pack(f"<{1 + top}i", row.rank, *[token_id for token_id, _ in row.top])
        values += struct.pack(f"<{1 + top}f", row.logprob, *[logprob for _, logprob in row.top])
    return LogprobRows(top, bytes(ids), bytes(values))


def joined(parts: Iterable[LogprobRows]) -> LogprobRows:
    """The rows of all parts, in order; there is at least one, and all have the same `top`."""
    parts = tuple(parts)
    (top,) = {part.top for part in parts}
    ids = b"".join([part.ids for part in parts])
    return LogprobRows(top, ids, b"".join([part.values for part in parts]))


def newest(parts: Iterable[LogprobRows], bytes_max: int) -> LogprobRows | None:
    """The last rows of all parts, as many as have `bytes_max`; None without any part."""
    parts = tuple(parts)
    if not parts:
        return None
    rows = joined(parts)
    kept = bytes_max // (2 * _ITEM_BYTES * (1 + rows.top))
    return rows.rows(max(0, len(rows) - kept))
