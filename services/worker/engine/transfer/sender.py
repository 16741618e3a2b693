"""The sending half of the mover: packs and sends KV and parameters in pieces, tracks answers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.worker.engine.transfer.errors import LaneFull, PeerUnknown, TransferRefused
from services.worker.engine.transfer.frame import ROOM_BYTES, Frame, FrameMemory, PayloadRoom
from services.worker.engine.transfer.lane import Lane
from services.worker.engine.transfer.link_pace import LinkPace
from services.worker.engine.transfer.outgoing import (
    OutgoingTransfer,
    OutgoingTransfers,
    PackedPiece,
)
from services.worker.engine.transfer.piece_window import WindowBounds
from services.worker.engine.transfer.pieces import KvPiece, PieceTaken, TransferAborted
from services.worker.engine.transfer.recent import Recent
from services.worker.errors import WorkerError

CANCELLED = "cancelled"
ENDED_MAX = 16_384  # ended transfers that are remembered
# How long, at least. A sender waits less for an answer, so no piece of its transfer comes later.
ENDED_S = 60.0
RETRY_S = 0.01  # pause after LaneFull

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SenderBounds:
    """Limits of outgoing transfers."""

    active_max: int  # transfers per peer that send pieces in turn
    window: WindowBounds  # per peer
    answer_timeout_s: float  # for each piece
    pace: LinkPace | None = None  # of a modelled link


class Sender:
    """Outgoing transfers of a mover. All calls are made by the thread that calls `Mover.step`."""

    def __init__(
        self, lane: Lane, bounds: SenderBounds, report: Callable[[TransferOutcome], None]
    ) -> None:
        self._lane = lane
        self._answer_timeout_s = bounds.answer_timeout_s
        self._pace = bounds.pace
        self._report = report
        self._outbox = OutgoingTransfers(bounds.active_max, bounds.window)
        self._memory = FrameMemory()
        self._ended = Recent[str, bool](ENDED_S, ENDED_MAX)  # ids of ended transfers
        self._retry_s: float | None = None  # when to send again after LaneFull

    def begin(self, transfer: OutgoingTransfer) -> None:
        """Queue a transfer."""
        self._outbox.add(transfer)

    def cancel(self, transfer_id: str) -> bool:
        """Abandon a transfer; returns False if this sender knows no transfer with that id."""
        transfer = self._outbox.find(transfer_id)
        if transfer is not None:
            self._abandon(transfer, CANCELLED)
        return transfer is not None or transfer_id in self._ended

    def handle(self, peer: str, header: PieceTaken | TransferAborted, now_s: float) -> None:
        """Handle a receiver's answer; answers about unknown transfers are ignored."""
        transfer = self._outbox.find(header.transfer_id)
        if transfer is None or transfer.peer != peer:
            return
        if isinstance(header, PieceTaken):
            self._outbox.note_answered(transfer, header.piece, now_s)
        else:
            self._abandon(transfer, f"refused: {header.reason}", notify_receiver=False)

    def forget_peer(self, peer: str, reason: str) -> None:
        """Abandon all transfers to a lost peer."""
        for transfer in self._outbox.all():
            if transfer.peer == peer:
                self._abandon(transfer, reason, notify_receiver=False)

    def piece_bytes(self, peer: str) -> int:
        """Return the size of the next piece to a peer, which occupies the link only briefly."""
        return self._outbox.piece_bytes(peer)

    def free_s(self, now_s: float) -> float:
        """When the link has sent all pieces so far, at `now_s` or, if it is paced, later."""
        return now_s if self._pace is None else max(now_s, self._pace.free_s)

    def has_piece(self, now_s: float) -> bool:
        """Whether `send_piece` has a piece to send."""
        if self._pace is not None and now_s < self._pace.free_s:
            return False
        return (self._retry_s is None or now_s >= self._retry_s) and self._outbox.has_turn()

    def send_piece(self, now_s: float) -> None:
        """Pack and send the next piece of the transfer whose turn it is. Raises LaneClosed."""
        self._retry_s = None
        transfer = self._outbox.next_turn()
        if transfer is None:
            return
        try:
            # If the lane is full, the piece stays packed for the next try.
            packed = transfer.packed = transfer.packed or self._pack(transfer)
            sent = self._lane.send(transfer.peer, packed.frame)
        except LaneFull:
            self._retry_s = now_s + RETRY_S
        except (PeerUnknown, _CannotPack) as error:
            self._abandon(transfer, str(error))
        else:
            transfer.packed = None
            if self._pace is not None:
                is_kv = isinstance(packed.frame.header, KvPiece)
                self._pace.note_sent(is_kv, len(packed.room.payload), now_s)
            transfer.sends.append((sent, packed.room))
            self._outbox.note_sent(transfer, packed, now_s)

    def finish(self, now_s: float) -> list[str]:
        """Report the transfers that have ended; returns their ids."""
        self._ended.expire(now_s)
        self._memory.expire(now_s)
        over = []
        # Report a transfer only when no send reads its memory, which the engine may reuse then.
        for transfer in self._outbox.all():
            problem = transfer.forget_done_sends(self._memory)
            oldest_s = transfer.oldest_s()
            if problem is not None:
                self._abandon(transfer, problem)
            elif oldest_s is not None and now_s >= oldest_s + self._answer_timeout_s:
                self._abandon(transfer, "the receiver did not answer in time")
            if transfer.is_over:
                self._outbox.remove(transfer)
                self._ended.add(transfer.transfer_id, True)
                self._report(_outcome(transfer))
                over.append(transfer.transfer_id)
        return over

    def dues_s(self) -> list[float]:
        """Return the times at which `finish` or `send_piece` is due."""
        sent = [transfer.oldest_s() for transfer in self._outbox.active()]
        dues = [oldest_s + self._answer_timeout_s for oldest_s in sent if oldest_s is not None]
        if self._pace is not None and self._outbox.has_turn():
            dues.append(self._pace.free_s)
        return dues if self._retry_s is None else [*dues, self._retry_s]

    def _pack(self, transfer: OutgoingTransfer) -> PackedPiece:
        taken = transfer.take_piece()
        if taken is None:
            raise _CannotPack("the pieces ended without a last piece")
        piece, read = taken
        room = PayloadRoom(self._memory.take(ROOM_BYTES + piece.size_bytes))
        try:
            # Pieces in a device's memory: copy the next piece while this piece is sent.
            if piece.read is not None and not piece.header.last:
                transfer.read_ahead()
            if read is None:
                piece.pack(room.payload)
            else:
                read.finish(room.payload)
        except WorkerError as error:
            raise _CannotPack(str(error)) from error
        transfer.complete = piece.header.last
        frame = Frame(transfer.group_id, transfer.epoch, piece.header, room)
        return PackedPiece(piece.header.piece, room, frame)

    def _abandon(
        self, transfer: OutgoingTransfer, reason: str, notify_receiver: bool = True
    ) -> None:
        """Abandon a transfer; `finish` reports it later, when no send reads its memory."""
        if transfer.ended is not None:
            return
        transfer.ended = reason
        transfer.packed = None
        transfer.discard_ahead()
        if notify_receiver:
            aborted = TransferAborted(transfer.transfer_id, True, reason)
            notify(self._lane, transfer.peer, transfer.group_id, transfer.epoch, aborted)


class _CannotPack(TransferRefused):
    """A piece could not be packed."""


def notify(lane: Lane, peer: str, group_id: str, epoch: int, header: msgspec.Struct) -> None:
    """Try to send an answer; if it is lost, a timeout of the peer ends the transfer."""
    try:
        lane.send(peer, Frame(group_id, epoch, header))
    except (LaneFull, PeerUnknown) as error:
        log.warning("an answer to %s was not sent: %s", peer, error)


def _outcome(transfer: OutgoingTransfer) -> TransferOutcome:
    transfer_id, peer = transfer.transfer_id, transfer.peer
    if transfer.ended is not None:
        return TransferOutcome(transfer_id, TransferStatus.FAILED, peer, reason=transfer.ended)
    return TransferOutcome(transfer_id, TransferStatus.SENT, peer, transfer.size_bytes)
