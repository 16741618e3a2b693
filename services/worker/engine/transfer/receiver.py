"""The receiving half of the mover: verifies pieces, has them stored, and answers them."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from services.core.changeover.epoch_fence import EpochStatus
from services.core.changeover.transfer_outcome import TransferOutcome, TransferStatus
from services.worker.engine.transfer.errors import TransferRefused
from services.worker.engine.transfer.frame import Bytes, Frame
from services.worker.engine.transfer.lane import Lane
from services.worker.engine.transfer.pieces import BulkPiece, PieceTaken, TransferAborted
from services.worker.engine.transfer.sender import CANCELLED, ENDED_MAX, notify
from services.worker.errors import WorkerError

TRANSFERS_MAX = 4096
PIECES_MAX = 1 << 20

Key = tuple[str, str]  # sender's worker id, transfer id


@dataclass(slots=True, eq=False)
class IncomingTransfer:
    """One transfer; `last` is the number of its last piece, None until that is known.

    The transfer fails at `until_s` unless another piece comes.
    """

    group_id: str
    epoch: int
    until_s: float = 0.0
    last: int | None = None
    highest: int = -1
    size_bytes: int = 0
    taken: set[int] = field(default_factory=set)

    @property
    def is_whole(self) -> bool:
        """Whether every piece was taken."""
        return self.last is not None and len(self.taken) == self.last + 1

    def check(self, frame: Frame, piece: BulkPiece) -> None:
        """Raise TransferRefused on a piece that cannot belong to the transfer."""
        if (self.group_id, self.epoch) != (frame.group_id, frame.epoch):
            raise TransferRefused("its pieces are of different epochs")
        if not 0 <= piece.piece < PIECES_MAX:
            raise TransferRefused(f"it has a piece {piece.piece}")
        last = piece.piece if piece.last else self.last
        if self.last not in (None, last):
            raise TransferRefused("it has two last pieces")
        if last is not None and max(self.highest, piece.piece) > last:
            raise TransferRefused("it has pieces after its last one")

    def take(self, piece: BulkPiece, size_bytes: int) -> None:
        """Note that a piece is stored."""
        self.taken.add(piece.piece)
        self.highest = max(self.highest, piece.piece)
        self.size_bytes += size_bytes
        if piece.last:
            self.last = piece.piece


class IncomingTransfers:
    """Incoming transfers by sender and id, bounded; remembers the latest that ended."""

    def __init__(self) -> None:
        self._transfers: dict[Key, IncomingTransfer] = {}
        self._ended: OrderedDict[Key, bool] = OrderedDict()  # whether all of it had come
        self._ended_ids: Counter[str] = Counter()
        self._unwanted: OrderedDict[str, None] = OrderedDict()

    def under_way(self) -> list[tuple[Key, IncomingTransfer]]:
        """All transfers that have begun and not ended."""
        return list(self._transfers.items())

    def transfer_of(self, key: Key, frame: Frame) -> IncomingTransfer:
        """The transfer of a piece, made if it is the first. Raises TransferRefused."""
        transfer = self._transfers.get(key)
        if transfer is None:
            if len(self._transfers) >= TRANSFERS_MAX:
                raise TransferRefused(f"{TRANSFERS_MAX} transfers are under way")
            transfer = self._transfers[key] = IncomingTransfer(frame.group_id, frame.epoch)
        return transfer

    def end(self, key: Key, whole: bool) -> None:
        """Forget the pieces of a transfer, but remember that it has ended."""
        self._transfers.pop(key, None)
        self._ended[key] = whole
        self._ended_ids[key[1]] += 1
        while len(self._ended) > ENDED_MAX:
            (_, transfer_id), _ = self._ended.popitem(last=False)
            self._ended_ids[transfer_id] -= 1
            self._ended_ids += Counter()  # drops zeros

    def ending(self, key: Key) -> bool | None:
        """True if all pieces had come, False if the transfer was given up, None if it goes on."""
        return False if key[1] in self._unwanted else self._ended.get(key)

    def is_over(self, transfer_id: str) -> bool:
        """Whether the end of a transfer of that id, from any peer, has been reported."""
        return transfer_id in self._ended_ids or transfer_id in self._unwanted

    def refuse_later(self, transfer_id: str) -> None:
        """Refuse a transfer that has not begun yet."""
        self._unwanted[transfer_id] = None
        while len(self._unwanted) > ENDED_MAX:
            self._unwanted.popitem(last=False)


BACKLOG_BYTES_MAX = 64 << 20  # of pieces that wait to be unpacked; beyond, the lane is not read
HELD_BYTES_MAX = 256 << 20  # of pieces of a future epoch
EPOCH_POLL_S = 0.01  # interval of looking whether an epoch has begun, for which no bell rings

EpochStatusOf = Callable[[str, int], EpochStatus]  # group id, epoch
Unpack = Callable[[BulkPiece, Bytes], None]


@dataclass(frozen=True, slots=True)
class ReceiverTimeouts:
    """How long to wait for the next piece of a transfer, and for a future epoch to begin."""

    idle_timeout_s: float
    future_wait_s: float


@dataclass(frozen=True, slots=True)
class _Arrived:
    key: Key
    piece: BulkPiece
    frame: Frame
    until_s: float = 0.0  # deadline of the epoch, for a piece of a future one


@dataclass(slots=True)
class _Pieces:
    """Pieces in the order in which they came, and how much memory they keep."""

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
    """For the thread that steps the mover."""

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
        self._arrived = _Pieces()
        self._held = _Pieces()

    @property
    def has_piece(self) -> bool:
        """Whether `receive_piece` has a piece."""
        return bool(self._arrived.pieces)

    @property
    def has_room(self) -> bool:
        """Whether more pieces may be taken from the lane."""
        return self._arrived.size_bytes < BACKLOG_BYTES_MAX

    def add(self, peer: str, piece: BulkPiece, frame: Frame) -> None:
        """Queue a piece."""
        self._arrived.add(_Arrived((peer, piece.transfer_id), piece, frame))

    def cancel(self, transfer_id: str) -> None:
        """Give up all transfers of that id, and one that has not begun yet."""
        keys = [key for key, _ in self._inbox.under_way() if key[1] == transfer_id]
        for key in keys:
            self._end(key, CANCELLED)
        if not keys and not self._inbox.is_over(transfer_id):
            self._inbox.refuse_later(transfer_id)
            self._report(TransferOutcome(transfer_id, TransferStatus.FAILED, reason=CANCELLED))

    def handle(self, peer: str, aborted: TransferAborted) -> None:
        """Handle that the sender has given a transfer up."""
        key = (peer, aborted.transfer_id)
        if self._inbox.ending(key) is None:
            self._end(key, f"given up by its sender: {aborted.reason}", tell=False)

    def forget_peer(self, peer: str, reason: str) -> None:
        """Give up all transfers from a lost peer."""
        self._arrived.forget_peer(peer)
        self._held.forget_peer(peer)
        for key, _ in self._inbox.under_way():
            if key[0] == peer:
                self._end(key, reason, tell=False)

    def receive_piece(self, now_s: float) -> None:
        """Verify, store and answer the oldest piece; a late or repeated piece has no effect."""
        arrived = self._arrived.take()
        key, piece, frame = arrived.key, arrived.piece, arrived.frame
        ending = self._inbox.ending(key)
        standing = self._epoch_status(frame.group_id, frame.epoch)
        if ending is not None:
            self._answer_late(arrived, whole=ending)
        elif standing is EpochStatus.CURRENT:
            self._store(arrived, now_s)
        elif standing is EpochStatus.FUTURE and self._held.size_bytes < HELD_BYTES_MAX:
            until_s = now_s + self._timeouts.future_wait_s
            self._held.add(_Arrived(key, piece, frame, until_s))
            return
        else:
            self._end(key, f"epoch {frame.epoch} of {frame.group_id} is not current")
        self._lane.give_back(frame)

    def take_held(self, now_s: float) -> None:
        """Queue the held pieces whose epoch has begun; give up those whose epoch is late."""
        for _ in range(len(self._held.pieces)):
            held = self._held.take()
            frame = held.frame
            if self._epoch_status(frame.group_id, frame.epoch) is not EpochStatus.FUTURE:
                self._arrived.add(held)
            elif now_s < held.until_s:
                self._held.add(held)
            elif self._inbox.ending(held.key) is None:
                self._end(held.key, f"epoch {frame.epoch} did not begin in time")

    def expire(self, now_s: float) -> None:
        """Give up transfers whose next piece is overdue."""
        for key, transfer in self._inbox.under_way():
            if now_s >= transfer.until_s:
                self._end(key, "the sender sent nothing more")

    def dues_s(self, now_s: float) -> list[float]:
        """The times at which `expire` or `take_held` has work."""
        dues = [transfer.until_s for _, transfer in self._inbox.under_way()]
        return [*dues, now_s + EPOCH_POLL_S] if self._held.pieces else dues

    def _store(self, arrived: _Arrived, now_s: float) -> None:
        key, piece, frame = arrived.key, arrived.piece, arrived.frame
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
        """Answer a piece of a transfer that has ended already."""
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

    def _end(self, key: Key, reason: str, tell: bool = True) -> None:
        """Give a transfer up, and tell its sender; pieces that still come are ignored."""
        peer, transfer_id = key
        self._inbox.end(key, whole=False)
        if tell:
            notify(self._lane, peer, "", 0, TransferAborted(transfer_id, False, reason))
        self._report(TransferOutcome(transfer_id, TransferStatus.FAILED, peer, reason=reason))
