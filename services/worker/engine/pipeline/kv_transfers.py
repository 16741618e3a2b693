"""KV transfers on the bulk lane: sends the KV of sequences, and stores received KV.

The change-over state machine (`core.changeover`) commands the transfers. The mover is the thread
that sends and receives them, in pieces of several blocks. It packs and stores each piece under the
stage's lock, and block tables change only under that lock. So a piece of a sequence that was
released meanwhile is refused and never touches the blocks of another sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from services.common import failpoint
from services.core.changeover.state import Changeover
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.changeover.vocabulary import SendBlocks
from services.core.shipments.vocabulary import ShipBlocks, part_of
from services.worker.engine.pipeline.failpoints import (
    SHIP_PART_SOURCE,
    SHIP_PART_TARGET,
    ChangeFailpoints,
)
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull, TransferRefused
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import (
    KvCut,
    KvPiece,
    OutgoingPiece,
    PackBlocks,
    kv_pieces,
)


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
        memory = self.stage.runner.stage_memory
        cut = KvCut(
            command.transfer_id,
            command.seq_id,
            range(command.transfer.first_layer, command.transfer.end_layer),
            command.blocks,
            memory.kv_ranges[0].shape.size_bytes,
        )
        piece_bytes = partial(self.mover.piece_bytes, command.transfer.destination)
        pieces = kv_pieces(cut, piece_bytes, self._packer(command.seq_id))
        place = self.links.group_id, self.links.epoch
        return self._start(command.transfer_id, command.transfer.destination, place, pieces)

    def ship(self, command: ShipBlocks) -> TransferOutcome | None:
        """Start the transfer of a shipment's part; like `send`, but in no epoch."""
        memory = self.stage.runner.stage_memory
        cut = KvCut(
            command.transfer_id,
            command.remote_pin,
            range(memory.num_layers),
            command.blocks,
            memory.kv_ranges[0].shape.size_bytes,
            command.first,
        )
        piece_bytes = partial(self.mover.piece_bytes, command.peer)
        pieces = kv_pieces(cut, piece_bytes, self._pin_packer(command.pin))
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
        with self.stage.lock:
            ids = self.changeover.kv_blocks_for(piece.transfer_id, piece.seq_id)
            end = piece.first_block + piece.num_blocks
            if end > len(ids):
                raise TransferRefused(f"{piece.seq_id} is not expected here any more")
            blocks = ids[piece.first_block : end]
            memory = self.stage.runner.stage_memory
            memory.unpack_kv(piece.layer, blocks, torch.from_numpy(payload))

    def _store_shipped(self, piece: KvPiece, payload: Bytes) -> None:
        failpoint.hit(SHIP_PART_TARGET)
        with self.stage.lock:
            blocks = self.changeover.landing_blocks(
                piece.transfer_id, piece.seq_id, piece.first_block, piece.num_blocks
            )
            if not blocks:
                raise TransferRefused(f"{piece.transfer_id} is not expected here any more")
            memory = self.stage.runner.stage_memory
            memory.unpack_kv(piece.layer, blocks, torch.from_numpy(payload))

    def _pin_packer(self, pin: str) -> PackBlocks:
        """Return a function that packs blocks of a pin, or raises TransferRefused."""

        def pack(layer: int, first: int, count: int, target: Bytes) -> None:
            failpoint.hit(SHIP_PART_SOURCE)
            # A pin is never taken again after its release; its blocks may have been relocated.
            with self.stage.lock:
                ids = self.stage.table.block_ids(pin)[first : first + count]
                if len(ids) < count:
                    raise TransferRefused(f"{pin} is released")
                memory = self.stage.runner.stage_memory
                memory.pack_kv(layer, ids, torch.from_numpy(target))

        return pack

    def _packer(self, seq_id: str) -> PackBlocks:
        """Return a function that packs the sequence's present blocks, or raises TransferRefused."""
        blocks_at_start = self.stage.table.block_ids(seq_id)

        def pack(layer: int, first: int, count: int, target: Bytes) -> None:
            self.failpoints.hit_change("kv_piece")
            # The sequence may have been released, or preempted and readmitted with other blocks.
            with self.stage.lock:
                ids = self.stage.table.block_ids(seq_id)[first : first + count]
                if len(ids) < count or ids != blocks_at_start[first : first + count]:
                    raise TransferRefused(f"{seq_id} is gone")
                memory = self.stage.runner.stage_memory
                memory.pack_kv(layer, ids, torch.from_numpy(target))

        return pack
