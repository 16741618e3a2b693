"""Planner events of shipments: KV that moves between single workers.

`pin` is the name of a pin, see `pins.py`. No event frees blocks of a suspended microbatch.
"""

from dataclasses import dataclass

from services.core.destination import Destination


@dataclass(frozen=True, slots=True)
class BlocksShared:
    """Pin the registered blocks of a running sequence; repeated, extend the pin by new blocks."""

    pin: str
    seq_id: str


@dataclass(frozen=True, slots=True)
class BlocksAllocated:
    """Pin `blocks` blocks for the KV of a request: cached blocks with `hashes`, then empty blocks.

    `hashes`: those of the first blocks. The caller has checked that enough blocks are free, or for
    an online request, that preempting batch sequences frees enough.
    """

    pin: str
    request_id: str
    online: bool
    hashes: tuple[bytes, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class BlocksFilled:
    """The KV of the first blocks of a pin is complete; the waiting sequence may start."""

    pin: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PinReleased:
    """Release a pin; a sequence that waits for it may start without the KV."""

    pin: str


@dataclass(frozen=True, slots=True)
class SequenceShipped:
    """End a running sequence and pin its registered blocks; it continues at another worker.

    Its request returns to its gateway, which starts it at `target`.
    """

    pin: str
    seq_id: str
    target: Destination


PinEvent = BlocksShared | BlocksAllocated | BlocksFilled | PinReleased | SequenceShipped
