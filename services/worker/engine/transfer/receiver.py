"""The receiving half of the mover: verifies, stores and answers the pieces of transfers.

A transfer is the KV of a sequence, or a slab of parameters; it arrives in pieces. The epoch of a
piece numbers the configuration of the sender's group. Pieces of an epoch that this member has yet
to enter are held until then.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.core.changeover.epoch_fence import EpochStatus
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.worker.engine.transfer.errors import TransferRefused
from services.worker.engine.transfer.frame import Bytes, Frame
from services.worker.engine.transfer.lane import Lane
from services.worker.engine.transfer.pieces import BulkPiece, PieceTaken, TransferAborted
from services.worker.engine.transfer.recent import Recent
from services.worker.engine.transfer.sender import CANCELLED, ENDED_MAX, ENDED_S, notify
from services.worker.errors import WorkerError

TRANSFERS_MAX = 4096  # in progress
PIECES_MAX = 1 << 20  # of a transfer

Key = tuple[str, str]  # sender's worker id, transfer id


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """A transfer in progress."""

    group_id: str
    epoch: int
    until_s: float = 0.0  # deadline of the next piece
    last: int | None = None  # number of its last piece, once known
    highest: int = -1  # highest piece number so far
    size_bytes: int = 0  # received so far
    taken: set[int] = field(default_factory=set)  # numbers of stored pieces

    @property
    def is_whole(self) -> bool:
        """Whether all pieces are stored."""
        return self.last is not None and len(self.taken) == self.last + 1

    def check(self, frame: Frame, piece: BulkPiece) -> None:
        """Raise TransferRefused on a piece that cannot belong to the transfer."""
        if (self.group_id, self.epoch) != (frame.group_id, frame.epoch):
            raise TransferRefused("its pieces have different epochs")
        if not 0 <= piece.piece < PIECES_MAX:
            raise TransferRefused(f"it has a piece number out of range: {piece.piece}")
        last = piece.piece if piece.last else self.last
        if self.last not in (None, last):
            raise TransferRefused("it has two last pieces")
        if last is not None and max(self.highest, piece.piece) > last:
            raise TransferRefused("it has pieces after its last piece")

    def take(self, piece: BulkPiece, size_bytes: int) -> None:
        """Note that a piece was stored."""
        self.taken.add(piece.piece)
        self.highest = max(self.highest, piece.piece)
        self.size_bytes += size_bytes
        if piece.last:
            self.last = piece.piece


class IncomingTransfers:
    """Incoming transfers in progress, at most `TRANSFERS_MAX`, and recently ended ones."""

    def __init__(self) -> None:
        self._transfers: dict[Key, IncomingTransfer] = {}
        self._ended = Recent[Key, bool](ENDED_S, ENDED_MAX)  # value: whether it was complete
        self._ended_ids = Recent[str, bool](ENDED_S, ENDED_MAX)  # several senders may share an id
        self._unwanted: OrderedDict[str, None] = OrderedDict()  # cancelled before they began

    def under_way(self) -> list[tuple[Key, IncomingTransfer]]:
        """All transfers in progress."""
        return list(self._transfers.items())

    def transfer_of(self, key: Key, frame: Frame) -> IncomingTransfer:
        """Return the transfer of a piece, created for its first piece. Raises TransferRefused."""
        transfer = self._transfers.get(key)
        if transfer is None:
            if len(self._transfers) >= TRANSFERS_MAX:
                raise TransferRefused(f"{TRANSFERS_MAX} transfers are in progress")
            transfer = self._transfers[key] = IncomingTransfer(frame.group_id, frame.epoch)
        return transfer

    def end(self, key: Key, whole: bool) -> None:
        """End a transfer, and remember it so that late pieces are recognized."""
        self._transfers.pop(key, None)
        self._ended.add(key, whole)
        self._ended_ids.add(key[1], True)

    def forget_ended(self, now_s: float) -> None:
        """Forget transfers that ended long ago; call it repeatedly."""
        self._ended.expire(now_s)
        self._ended_ids.expire(now_s)

    def completion(self, key: Key) -> bool | None:
        """Return True if the transfer has completed, False if it was abandoned, else None."""
        return False if key[1] in self._unwanted else self._ended.get(key)

    def is_over(self, transfer_id: str) -> bool:
        """Whether the end of a transfer with that id, from any peer, was reported."""
        return transfer_id in self._ended_ids or transfer_id in self._unwanted

    def refuse_in_advance(self, transfer_id: str) -> None:
        """Refuse the pieces of a transfer that has not started yet."""
        self._unwanted[transfer_id] = None
        while len(self._unwanted) > ENDED_MAX:
            self._unwanted.popitem(last=False)


BACKLOG_BYTES_MAX = 64 << 20  # of pieces that wait to be stored; with more, the lane is not read
HELD_BYTES_MAX = 256 << 20  # of held pieces (of future epochs)
EPOCH_POLL_S = 0.01  # poll interval for the start of an epoch, which does not wake the mover

EpochStatusOf = Callable[[str, int], EpochStatus]  # group id, epoch
Unpack = Callable[[BulkPiece, Bytes], None]


@dataclass(frozen=True, slots=True)
class ReceiverTimeouts:
    """Timeouts of incoming transfers."""

    idle_timeout_s: float  # between two pieces of a transfer
    future_wait_s: float  # for this member to enter a future epoch


@dataclass(frozen=True, slots=True)
class _Arrived:
    key: Key
    piece: BulkPiece
    frame: Frame
    until_s: float = 0.0  # deadline for its epoch to begin, if the piece is held


@dataclass(slots=True)
class _Pieces:
    """A FIFO of pieces, and the memory that they occupy."""

    pieces: deque[_Arrived] = field(default_factory=deque)
    size_bytes: int = 0

    def add(self, arrived: _Arrived) -> None:
        self.pieces.append(arrived)
        self.size_bytes += arrived.frame.size_bytes

    def take(self) -> _Arrived:
        arrived = self.pieces.popleft()
        self.size_bytes -= arrived.frame.size_bytes
        return arrived

    def forget_peer(self, peer: str) -> None:
        for _ in range(len(self.pieces)):
            arrived = self.take()
            if arrived.key[0] != peer:
                self.add(arrived)


class Receiver:
    """Incoming transfers of a mover. All calls are made by the thread that calls `Mover.step`."""

    def __init__(
        self,
        lane: Lane,
        timeouts: ReceiverTimeouts,
        epoch_status: EpochStatusOf,
        unpack: Unpack,
        report: Callable[[TransferOutcome], None],
    ) -> None:
        self._lane = lane
        self._timeouts = timeouts
        self._epoch_status = epoch_status
        self._unpack = unpack
        self._report = report
        self._inbox = IncomingTransfers()
        self._arrived = _Pieces()  # to be stored
        self._held = _Pieces()  # of future epochs

    @property
    def has_piece(self) -> bool:
        """Whether `receive_piece` has a piece to handle."""
        return bool(self._arrived.pieces)

    @property
    def has_room(self) -> bool:
        """Whether the backlog allows more pieces from the lane."""
        return self._arrived.size_bytes < BACKLOG_BYTES_MAX

    def add(self, peer: str, piece: BulkPiece, frame: Frame) -> None:
        """Queue a piece for `receive_piece`."""
        self._arrived.add(_Arrived((peer, piece.transfer_id), piece, frame))

    def cancel(self, transfer_id: str) -> None:
        """Abandon all transfers with that id, also before their first piece."""
        keys = [key for key, _ in self._inbox.under_way() if key[1] == transfer_id]
        for key in keys:
            self._end(key, CANCELLED)
        if not keys and not self._inbox.is_over(transfer_id):
            self._inbox.refuse_in_advance(transfer_id)
            self._report(TransferOutcome(transfer_id, TransferStatus.FAILED, reason=CANCELLED))

    def handle(self, peer: str, aborted: TransferAborted) -> None:
        """Handle a sender's notice that it has abandoned a transfer."""
        key = (peer, aborted.transfer_id)
        if self._inbox.completion(key) is None:
            self._end(key, f"abandoned by its sender: {aborted.reason}", notify_sender=False)

    def forget_peer(self, peer: str, reason: str) -> None:
        """Abandon all transfers from a lost peer."""
        self._arrived.forget_peer(peer)
        self._held.forget_peer(peer)
        for key, _ in self._inbox.under_way():
            if key[0] == peer:
                self._end(key, reason, notify_sender=False)

    def receive_piece(self, now_s: float) -> None:
        """Verify, store and answer the oldest piece; late and duplicate pieces are not stored."""
        arrived = self._arrived.take()
        key, piece, frame = arrived.key, arrived.piece, arrived.frame
        completion = self._inbox.completion(key)
        status = self._epoch_status(frame.group_id, frame.epoch)
        if completion is not None:
            self._answer_late(arrived, whole=completion)
        elif status is EpochStatus.CURRENT:
            self._store(arrived, now_s)
        elif status is EpochStatus.FUTURE and self._held.size_bytes < HELD_BYTES_MAX:
            # This member has not entered the epoch yet: hold the piece until it does.
            until_s = now_s + self._timeouts.future_wait_s
            self._held.add(_Arrived(key, piece, frame, until_s))
            return
        else:
            self._end(key, f"epoch {frame.epoch} of {frame.group_id} is not current")
        self._lane.give_back(frame)

    def take_held(self, now_s: float) -> None:
        """Queue the held pieces whose epoch has begun; abandon transfers whose epoch is overdue."""
        for _ in range(len(self._held.pieces)):
            held = self._held.take()
            frame = held.frame
            if self._epoch_status(frame.group_id, frame.epoch) is not EpochStatus.FUTURE:
                self._arrived.add(held)
            elif now_s < held.until_s:
                self._held.add(held)
            elif self._inbox.completion(held.key) is None:
                self._end(held.key, f"epoch {frame.epoch} did not begin in time")

    def expire(self, now_s: float) -> None:
        """Abandon transfers whose next piece is overdue, and forget those that ended long ago."""
        self._inbox.forget_ended(now_s)
        for key, transfer in self._inbox.under_way():
            if now_s >= transfer.until_s:
                self._end(key, "the sender sent no more pieces")

    def dues_s(self, now_s: float) -> list[float]:
        """Return the times at which `expire` or `take_held` is due."""
        dues = [transfer.until_s for _, transfer in self._inbox.under_way()]
        return [*dues, now_s + EPOCH_POLL_S] if self._held.pieces else dues

    def _store(self, arrived: _Arrived, now_s: float) -> None:
        key, piece, frame = arrived.key, arrived.piece, arrived.frame
        # A failure, even of the checksum, abandons this transfer and not the connection.
        try:
            frame.verify()
            transfer = self._inbox.transfer_of(key, frame)
            transfer.check(frame, piece)
            if piece.piece not in transfer.taken:
                self._unpack(piece, frame.payload)
                transfer.take(piece, frame.payload.size)
        except WorkerError as error:
            self._end(key, str(error))
            return
        transfer.until_s = now_s + self._timeouts.idle_timeout_s
        self._answer(arrived)
        if transfer.is_whole:
            self._inbox.end(key, whole=True)
            peer, transfer_id = key
            size_bytes, status = transfer.size_bytes, TransferStatus.RECEIVED
            self._report(TransferOutcome(transfer_id, status, peer, size_bytes))

    def _answer_late(self, arrived: _Arrived, whole: bool) -> None:
        """Answer a piece of an ended transfer again: the first answer may have been lost."""
        peer, transfer_id = arrived.key
        if whole:
            self._answer(arrived)
        else:
            frame = arrived.frame
            aborted = TransferAborted(transfer_id, False, "the transfer has ended")
            notify(self._lane, peer, frame.group_id, frame.epoch, aborted)

    def _answer(self, arrived: _Arrived) -> None:
        peer, transfer_id = arrived.key
        taken = PieceTaken(transfer_id, arrived.piece.piece)
        notify(self._lane, peer, arrived.frame.group_id, arrived.frame.epoch, taken)

    def _end(self, key: Key, reason: str, notify_sender: bool = True) -> None:
        """Abandon a transfer, and notify its sender; later pieces are ignored."""
        peer, transfer_id = key
        self._inbox.end(key, whole=False)
        if notify_sender:
            notify(self._lane, peer, "", 0, TransferAborted(transfer_id, False, reason))
        self._report(TransferOutcome(transfer_id, TransferStatus.FAILED, peer, reason=reason))
