"""How a transfer between two workers ended; used by the mover, the pipeline and the change-over."""

from dataclasses import dataclass
from enum import StrEnum


class TransferStatus(StrEnum):
    """The end of a transfer, as seen from either of its two workers."""

    SENT = "sent"  # the receiver has verified and stored all pieces: the original may be freed
    RECEIVED = "received"  # all pieces were verified and stored here
    FAILED = "failed"  # abandoned; nothing reads or writes its memory any more


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The end of a transfer; each worker reports it exactly once, and uses its memory until then.

    `peer` is the other worker, "" if a transfer was cancelled here before any peer had begun it.
    `size_bytes` counts payload bytes and is 0 for a failure, whose cause is `reason`.
    """

    transfer_id: str
    status: TransferStatus
    peer: str = ""
    size_bytes: int = 0
    reason: str = ""
