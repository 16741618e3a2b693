"""Frame kinds, payloads and a memory for tests of transfers between engines."""

from dataclasses import dataclass, field

import msgspec
import numpy as np

from services.core.changeover.epoch_fence import EpochStatus
from services.worker.engine.transfer.errors import TransferRefused
from services.worker.engine.transfer.frame import Bytes, FrameCodec
from services.worker.engine.transfer.pieces import (
    BULK_KINDS,
    BulkPiece,
    KvCut,
    KvPiece,
    SlabCut,
)


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A frame kind of the tests."""

    text: str


CODEC = FrameCodec({1: Note, **BULK_KINDS})
NONCE = b"0123456789abcdef"


def bytes_of(size_bytes: int, seed: int = 0) -> Bytes:
    """Reproducible random bytes."""
    return np.random.default_rng(seed).integers(0, 256, size_bytes, dtype=np.uint8)


@dataclass
class Memory:
    """A slab of bytes and a KV cache: [layer, block, bytes of a block]."""

    slab: Bytes
    kv: Bytes
    epochs: dict[str, int] = field(default_factory=lambda: {"g": 1})
    reads: int = 0
    writes: int = 0
    refuses: bool = False

    def slab_cut(self, transfer_id: str = "t") -> SlabCut:
        """The whole slab."""
        return SlabCut(transfer_id, "layer 0", self.slab.size)

    def kv_cut(self, transfer_id: str = "t") -> KvCut:
        """All blocks of all layers."""
        layers, num_blocks, block_bytes = self.kv.shape
        return KvCut(transfer_id, "request", range(layers), num_blocks, block_bytes)

    def pack_slab(self, offset_bytes: int, target: Bytes) -> None:
        """Write a part of the slab to `target`."""
        self.reads += 1
        target[:] = self.slab[offset_bytes : offset_bytes + target.size]

    def pack_kv(self, layer: int, first_block: int, num_blocks: int, target: Bytes) -> None:
        """Write blocks to `target`."""
        self.reads += 1
        target[:] = self.kv[layer, first_block : first_block + num_blocks].reshape(-1)

    def standing(self, group_id: str, epoch: int) -> EpochStatus:
        """Compare an epoch with the one that the test has set."""
        return EpochStatus.of(epoch, self.epochs.get(group_id, 0))

    def unpack(self, piece: BulkPiece, payload: Bytes) -> None:
        """Store a piece."""
        if self.refuses:
            raise TransferRefused("there is no place for it")
        self.writes += 1
        if isinstance(piece, KvPiece):
            end = piece.first_block + piece.num_blocks
            place = self.kv[piece.layer, piece.first_block : end]
            place[:] = payload.reshape(place.shape)
        else:
            self.slab[piece.offset_bytes : piece.offset_bytes + payload.size] = payload


def filled(size_bytes: int, seed: int = 0) -> Memory:
    """A memory with random content; the KV has 3 layers of 7 blocks."""
    return Memory(bytes_of(size_bytes, seed), bytes_of(3 * 7 * 512, seed + 1).reshape(3, 7, 512))


def empty_like(memory: Memory) -> Memory:
    """A memory to receive into."""
    return Memory(np.zeros_like(memory.slab), np.zeros_like(memory.kv))
