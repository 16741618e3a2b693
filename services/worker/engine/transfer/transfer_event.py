"""How a transfer ends: with exactly one of these. Until then its memory is in use."""

from dataclasses import dataclass
from enum import Enum, auto


class Standing(Enum):
    """What a receiver thinks of an epoch. Pieces of a future one wait for a while."""

    CURRENT = auto()
    STALE = auto()
    FUTURE = auto()


@dataclass(frozen=True, slots=True)
class TransferSent:
    """The receiver has verified and stored all of it: the original may be freed."""

    transfer_id: str
    peer: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TransferReceived:
    """All pieces were verified and unpacked."""

    transfer_id: str
    peer: str
    group_id: str
    epoch: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """It was given up, and nothing reads or writes its memory any more.

    `peer` is empty when a transfer was cancelled here that no peer had begun.
    """

    transfer_id: str
    peer: str
    outgoing: bool
    reason: str


TransferEvent = TransferSent | TransferReceived | TransferFailed

CANCELLED = "cancelled"
ENDED_MAX = 16_384  # ends that are remembered
