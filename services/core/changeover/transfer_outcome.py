"""The result of a bulk transfer (KV or parameters) between two workers, for `Changeover`."""

from dataclasses import dataclass
from enum import StrEnum


class TransferStatus(StrEnum):
    """The result of a transfer, as its sender (SENT) or receiver (RECEIVED) reports it."""

    SENT = "sent"  # the receiver has verified and stored all pieces: the sender may free its copy
    RECEIVED = "received"  # all pieces were verified and stored here
    FAILED = "failed"  # abandoned; the transfer no longer reads or writes memory here


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The result of a transfer at one of its workers, which reports exactly one.

    Until the report, the transfer may access the memory of its blocks or slab. `peer` is the other
    worker, or "" if the transfer was cancelled here before a peer started it. `size_bytes` is the
    size of the payload, or 0 after a failure, whose cause is `reason`.
    """

    transfer_id: str
    status: TransferStatus
    peer: str = ""
    size_bytes: int = 0
    reason: str = ""
