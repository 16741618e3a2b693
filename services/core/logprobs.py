"""Packs log probabilities of consecutive tokens, which are copied often and decoded rarely."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from services.core.request import TokenLogprobs

_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """A row per token: its own log probability, and those of the `top` most likely tokens.

    `ids` holds little-endian int32 [rows, 1 + top]: the token's rank, from 1, and then the ids of
    the most likely tokens, best first. `values` holds float32 of the same shape: the log
    probability of the token itself, and then those of the most likely tokens.
    """

    top: int
    ids: bytes = b""
    values: bytes = b""

    def __len__(self) -> int:
        return len(self.values) // self._row_bytes

    def __add__(self, other: "LogprobRows") -> "LogprobRows":
        """Concatenate the rows of two parts with the same `top`."""
        return joined((self, other))

    def rows(self, first: int, end: int | None = None) -> "LogprobRows":
        """Rows `first` to `end` (exclusive), with the semantics of a list slice."""
        first, end, _ = slice(first, end).indices(len(self))
        part = slice(first * self._row_bytes, max(first, end) * self._row_bytes)
        return LogprobRows(self.top, self.ids[part], self.values[part])

    def unpacked(self) -> list[TokenLogprobs]:
        """Decode the rows."""
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
    """Encode rows, each with `top` alternatives."""
    ids, values = bytearray(), bytearray()
    for row in rows:
        ids += struct.pack(f"<{1 + top}i", row.rank, *[token_id for token_id, _ in row.top])
        values += struct.pack(f"<{1 + top}f", row.logprob, *[logprob for _, logprob in row.top])
    return LogprobRows(top, bytes(ids), bytes(values))


def joined(parts: Iterable[LogprobRows]) -> LogprobRows:
    """Concatenate the rows of `parts`, which is not empty; all have the same `top`."""
    parts = tuple(parts)
    (top,) = {part.top for part in parts}
    ids = b"".join([part.ids for part in parts])
    return LogprobRows(top, ids, b"".join([part.values for part in parts]))


def newest_rows(parts: Iterable[LogprobRows], bytes_max: int) -> LogprobRows | None:
    """The last rows of the concatenated `parts` that fit into `bytes_max`; None without parts."""
    parts = tuple(parts)
    if not parts:
        return None
    rows = joined(parts)
    kept = bytes_max // (2 * _ITEM_BYTES * (1 + rows.top))
    return rows.rows(max(0, len(rows) - kept))
