"""KV transfers on the bulk lane: sends the KV of sequences, and stores received KV.

The change-over state machine (`core.changeover`) commands the transfers. The mover is the thread
that sends and receives them, in pieces of several blocks. Under the stage's lock it looks up the
blocks of a piece and starts their copy, and block tables change only under that lock. So a piece of
a sequence that was released meanwhile is refused and never touches the blocks of another sequence.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from services.common import failpoint
from services.core.changeover.state import Changeover
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.changeover.vocabulary import SendBlocks
from services.core.shipments.vocabulary import ShipBlocks, part_of
from services.worker.engine.memory.device_copies import PinnedSlot
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.pipeline.failpoints import (
    SHIP_PART_SOURCE,
    SHIP_PART_TARGET,
    ChangeFailpoints,
)
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.piece_copies import Copy, PieceAhead, PieceCopies
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull, TransferRefused
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import (
    KvCut,
    KvPiece,
    OutgoingPiece,
    kv_pieces,
)

OwnBlocks = Callable[[int, int], Sequence[int]]
"""Returns `count` blocks from logical block `first` on; called with the stage's lock held. Raises
TransferRefused."""


@dataclass(slots=True)
class KvTransfers:
    """The KV transfers of an engine."""

    changeover: Changeover
    links: Links
    stage: StageRunner
    mover: Mover
    failpoints: ChangeFailpoints

    def send(self, command: SendBlocks) -> TransferOutcome | None:
        """Start a transfer in the background; returns a FAILED outcome if the mover is full."""
        memory = self._memory
        cut = KvCut(
            command.transfer_id,
            command.seq_id,
            range(command.transfer.first_layer, command.transfer.end_layer),
            command.blocks,
            memory.kv_ranges[0].shape.size_bytes,
        )
        piece_bytes = partial(self.mover.piece_bytes, command.transfer.destination)
        pieces = self._pieces(cut, piece_bytes, self._own_blocks(command.seq_id), self._hit_piece)
        place = self.links.group_id, self.links.epoch
        return self._start(command.transfer_id, command.transfer.destination, place, pieces)

    def ship(self, command: ShipBlocks) -> TransferOutcome | None:
        """Start the transfer of a shipment's part; like `send`, but in no epoch."""
        memory = self._memory
        cut = KvCut(
            command.transfer_id,
            command.remote_pin,
            range(memory.num_layers),
            command.blocks,
            memory.kv_ranges[0].shape.size_bytes,
            command.first,
        )
        piece_bytes = partial(self.mover.piece_bytes, command.peer)
        pieces = self._pieces(cut, piece_bytes, self._pin_blocks(command.pin), self._hit_part)
        return self._start(command.transfer_id, command.peer, ("", 0), pieces)

    def _start(
        self, transfer_id: str, peer: str, place: tuple[str, int], pieces: Iterator[OutgoingPiece]
    ) -> TransferOutcome | None:
        try:
            self.mover.send(transfer_id, peer, *place, pieces)
        except MoverFull as error:
            return TransferOutcome(transfer_id, TransferStatus.FAILED, peer, reason=str(error))
        return None

    def store(self, piece: KvPiece, payload: Bytes) -> None:
        """Store a received piece; called on the mover's thread.

        Raises:
            TransferRefused: if the sequence has no blocks for the transfer any more.
        """
        if part_of(piece.transfer_id) is not None:
            self._store_shipped(piece, payload)
            return
        self.failpoints.hit_change("kv_arrived")

        def write(source: torch.Tensor | PinnedSlot) -> None:
            ids = self.changeover.kv_blocks_for(piece.transfer_id, piece.seq_id)
            end = piece.first_block + piece.num_blocks
            if end > len(ids):
                raise TransferRefused(f"{piece.seq_id} is not expected here any more")
            blocks = ids[piece.first_block : end]
            self._memory.unpack_kv(piece.layer, blocks, source)

        self._copies.unpack(payload, write)

    def _store_shipped(self, piece: KvPiece, payload: Bytes) -> None:
        failpoint.hit(SHIP_PART_TARGET)

        def write(source: torch.Tensor | PinnedSlot) -> None:
            blocks = self.changeover.landing_blocks(
                piece.transfer_id, piece.seq_id, piece.first_block, piece.num_blocks
            )
            if not blocks:
                raise TransferRefused(f"{piece.transfer_id} is not expected here any more")
            self._memory.unpack_kv(piece.layer, blocks, source)

        self._copies.unpack(payload, write)

    def _pieces(
        self,
        cut: KvCut,
        piece_bytes: Callable[[], int],
        own_blocks: OwnBlocks,
        hit: Callable[[], None],
    ) -> Iterator[OutgoingPiece]:
        """Divide the KV of `cut`, which is in `own_blocks`; `hit` is called for each piece."""

        def reader(layer: int, first: int, count: int) -> Copy:
            def read(target: torch.Tensor | PinnedSlot) -> None:
                self._memory.pack_kv(layer, own_blocks(first, count), target)

            hit()
            return read

        def pack(layer: int, first: int, count: int, target: Bytes) -> None:
            self._copies.pack(target, reader(layer, first, count))

        def read_ahead(layer: int, first: int, count: int) -> PieceAhead | None:
            size_bytes = count * cut.block_bytes
            return self._copies.read_ahead(size_bytes, reader(layer, first, count))

        return kv_pieces(cut, piece_bytes, pack, read_ahead if self._copies.reads_ahead else None)

    def _pin_blocks(self, pin: str) -> OwnBlocks:
        """Return a function that looks up the present blocks of a pin."""

        def own_blocks(first: int, count: int) -> Sequence[int]:
            # A pin is never taken again after its release; its blocks may have been relocated.
            ids = self.stage.table.block_ids(pin)[first : first + count]
            if len(ids) < count:
                raise TransferRefused(f"{pin} is released")
            return ids

        return own_blocks

    def _own_blocks(self, seq_id: str) -> OwnBlocks:
        """Return a function that looks up the sequence's blocks, which must not change."""
        blocks_at_start = self.stage.table.block_ids(seq_id)

        def own_blocks(first: int, count: int) -> Sequence[int]:
            # The sequence may have been released, or preempted and readmitted with other blocks.
            ids = self.stage.table.block_ids(seq_id)[first : first + count]
            if len(ids) < count or ids != blocks_at_start[first : first + count]:
                raise TransferRefused(f"{seq_id} is gone")
            return ids

        return own_blocks

    def _hit_piece(self) -> None:
        self.failpoints.hit_change("kv_piece")

    @staticmethod
    def _hit_part() -> None:
        failpoint.hit(SHIP_PART_SOURCE)

    @property
    def _copies(self) -> PieceCopies:
        return PieceCopies(self.stage)

    @property
    def _memory(self) -> StageMemory:
        return self.stage.runner.stage_memory
