"""KV transfers on the bulk lane: sends the KV of sequences, and stores received KV.

The change-over state machine (`core.changeover`) commands the transfers. The mover is the thread
that sends and receives them, in pieces of several blocks. It packs and stores each piece under the
stage's lock, and block tables change only under that lock. So a piece of a sequence that was
released meanwhile is refused and never touches the blocks of another sequence.
"""

from dataclasses import dataclass
from functools import partial

import torch

from services.core.changeover.state import Changeover
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.core.changeover.vocabulary import SendBlocks
from services.worker.engine.pipeline.failpoints import ChangeFailpoints
from services.worker.engine.pipeline.links import Links
from services.worker.engine.pipeline.stage_runner import StageRunner
from services.worker.engine.transfer.errors import MoverFull, TransferRefused
from services.worker.engine.transfer.frame import Bytes
from services.worker.engine.transfer.mover import Mover
from services.worker.engine.transfer.pieces import KvCut, KvPiece, PackBlocks, kv_pieces


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
        try:
            self.mover.send(
                command.transfer_id,
                command.transfer.destination,
                self.links.group_id,
                self.links.epoch,
                pieces,
            )
        except MoverFull as error:
            transfer_id, peer = command.transfer_id, command.transfer.destination
            return TransferOutcome(transfer_id, TransferStatus.FAILED, peer, reason=str(error))
        return None

    def store(self, piece: KvPiece, payload: Bytes) -> None:
        """Store a received piece; called on the mover's thread.

        Raises:
            TransferRefused: if the sequence has no blocks for the transfer any more.
        """
        self.failpoints.hit_change("kv_arrived")
        with self.stage.lock:
            ids = self.changeover.kv_blocks_for(piece.transfer_id, piece.seq_id)
            end = piece.first_block + piece.num_blocks
            if end > len(ids):
                raise TransferRefused(f"{piece.seq_id} is not expected here any more")
            blocks = ids[piece.first_block : end]
            memory = self.stage.runner.stage_memory
            memory.unpack_kv(piece.layer, blocks, torch.from_numpy(payload))

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
