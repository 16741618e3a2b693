"""The ends of a transfer. Every transfer has exactly one; its memory is in use until then."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferSent:
    """The receiver has verified and stored all pieces: the original may be freed."""

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
    """The transfer was given up, and nothing reads or writes its memory any more.

    `peer` is None if a transfer was cancelled here before any peer had begun it.
    """

    transfer_id: str
    peer: str | None
    outgoing: bool
    reason: str


TransferEvent = TransferSent | TransferReceived | TransferFailed

CANCELLED = "cancelled"
ENDED_MAX = 16_384  # ended transfers that are remembered
