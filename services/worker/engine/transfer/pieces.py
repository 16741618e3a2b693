"""The frames of the bulk lane, and the division of KV and parameters into pieces.

A transfer sends the KV of a sequence, or a parameter slab (the memory with the parameters of a
layer or of the embeddings), as pieces 0, 1, …; each piece is a frame. The receiver answers each
piece, so that the sender knows when to free the original.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from services.worker.engine.transfer.frame import Bytes

PackBlocks = Callable[[int, int, int, Bytes], None]  # layer, first logical block, count, target
PackBytes = Callable[[int, Bytes], None]  # offset_bytes, target


class PieceRead(Protocol):
    """A piece whose copy from a device to the host has started. Call either method, once."""

    def finish(self, target: Bytes) -> None:
        """Write the piece to `target`."""

    def discard(self) -> None:
        """Forget the piece."""


ReadBlocks = Callable[[int, int, int], PieceRead | None]  # as `PackBlocks`, without the target
ReadBytes = Callable[[int, int], PieceRead | None]  # offset_bytes, size_bytes


class KvPiece(msgspec.Struct, frozen=True, array_like=True):
    """KV of consecutive logical blocks of a sequence in a single layer.

    Payload: [block, 2, slot, kv_head, head_dim] in the model's dtype.
    """

    transfer_id: str
    piece: int
    last: bool
    seq_id: str
    layer: int
    first_block: int
    num_blocks: int


class ParameterPiece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a parameter slab, which has `total_bytes` in total."""

    transfer_id: str
    piece: int
    last: bool
    slab: str
    offset_bytes: int
    total_bytes: int


class PieceTaken(msgspec.Struct, frozen=True, array_like=True):
    """The receiver's answer: it has verified and stored a piece."""

    transfer_id: str
    piece: int


class TransferAborted(msgspec.Struct, frozen=True, array_like=True):
    """A notice that a side has abandoned a transfer; `by_sender` if that side sends the pieces."""

    transfer_id: str
    by_sender: bool
    reason: str


BulkPiece = KvPiece | ParameterPiece
BULK_KINDS: dict[int, type[msgspec.Struct]] = {
    0x100: KvPiece,
    0x101: ParameterPiece,
    0x102: PieceTaken,
    0x103: TransferAborted,
}
"""Frame types by their number on the wire."""


@dataclass(frozen=True, slots=True)
class OutgoingPiece:
    """A piece to send; `pack` writes its payload of `size_bytes` right before it is sent.

    `read`, if any, may be called earlier; None: `pack` must be called when the piece is due.
    """

    header: BulkPiece
    size_bytes: int
    pack: Callable[[Bytes], None]
    read: Callable[[], PieceRead | None] | None = None


@dataclass(frozen=True, slots=True)
class KvCut:
    """The KV of a sequence to send, not empty; `block_bytes` is a block's size in one layer.

    `num_blocks` logical blocks are sent, from `first_block` on.
    """

    transfer_id: str
    seq_id: str
    layers: Sequence[int]
    num_blocks: int
    block_bytes: int
    first_block: int = 0

    def __post_init__(self) -> None:
        if not self.layers or self.num_blocks < 1 or self.block_bytes < 1:
            raise ValueError(f"transfer {self.transfer_id} is empty")


@dataclass(frozen=True, slots=True)
class SlabCut:
    """A parameter slab to send."""

    transfer_id: str
    slab: str
    total_bytes: int

    def __post_init__(self) -> None:
        if self.total_bytes < 1:
            raise ValueError(f"transfer {self.transfer_id} is empty")


def kv_pieces(
    cut: KvCut, chunk_bytes: Callable[[], int], pack: PackBlocks, read: ReadBlocks | None = None
) -> Iterator[OutgoingPiece]:
    """Divide KV into pieces of at most `chunk_bytes()`, but at least a block, layer by layer.

    `chunk_bytes` is called for each piece, so that the size adapts to the link. `read` starts to
    read a piece before it is due.
    """
    piece, end = 0, cut.first_block + cut.num_blocks
    for layer in cut.layers:
        first = cut.first_block
        while first < end:
            count = min(end - first, max(1, chunk_bytes() // cut.block_bytes))
            last = layer == cut.layers[-1] and first + count == end
            header = KvPiece(cut.transfer_id, piece, last, cut.seq_id, layer, first, count)
            size = count * cut.block_bytes
            place = layer, first, count
            ahead = None if read is None else partial(read, *place)
            yield OutgoingPiece(header, size, partial(pack, *place), ahead)
            first += count
            piece += 1


def parameter_pieces(
    cut: SlabCut, chunk_bytes: Callable[[], int], pack: PackBytes, read: ReadBytes | None = None
) -> Iterator[OutgoingPiece]:
    """Divide a slab into pieces; arguments as for `kv_pieces`."""
    piece, offset = 0, 0
    while offset < cut.total_bytes:
        size = min(cut.total_bytes - offset, chunk_bytes())
        last = offset + size == cut.total_bytes
        header = ParameterPiece(cut.transfer_id, piece, last, cut.slab, offset, cut.total_bytes)
        ahead = None if read is None else partial(read, offset, size)
        yield OutgoingPiece(header, size, partial(pack, offset), ahead)
        offset += size
        piece += 1
