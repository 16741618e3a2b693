"""The order in which the lines of a batch run: the key by which they are sorted.

Keys are 64-bit signed integers; lines with equal keys run in the order of the file.
"""

from enum import StrEnum
from hashlib import blake2b

LEVELS_BYTES = (128, 512, 2048, 8192)
"""Lengths of the beginnings of a prompt that are compared, in bytes."""
_LEVEL_BITS, _LENGTH_BITS = 12, 15


class BatchOrder(StrEnum):
    """The orders; the values are those of the setting `batch_order`."""

    PREFIX = "prefix"
    """Lines whose prompts begin alike run one after the other, so that they share cached KV."""
    FIFO = "fifo"
    """The order of the file."""
    SJF = "sjf"
    """Fewest tokens first: most lines per second (BucketServe §II-B)."""
    LJF = "ljf"
    """Most tokens first: most tokens per second (BucketServe §II-B)."""


def sort_key(order: BatchOrder, beginning: bytes, tokens: int) -> int:
    """The key of a line; `beginning`: the first bytes of its prompt, `tokens`: an estimate of all
    its tokens."""
    match order:
        case BatchOrder.FIFO:
            return 0
        case BatchOrder.SJF:
            return tokens
        case BatchOrder.LJF:
            return -tokens
    key = 0
    # A few bits of the hash of each beginning, the shortest first: lines are together as far as
    # they begin alike. Lines that are together by chance cost nothing.
    for length in LEVELS_BYTES:
        digest = blake2b(beginning[:length], digest_size=2).digest()
        key = key << _LEVEL_BITS | int.from_bytes(digest, "big") >> 16 - _LEVEL_BITS
    return (key << _LENGTH_BITS) | min(tokens, (1 << _LENGTH_BITS) - 1)
