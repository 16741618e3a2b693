"""The outgoing transfers of the mover (KV of a sequence or a parameter slab, sent in pieces).

Tracks their turns to send, and the pieces that the receiver has not answered yet.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.worker.engine.transfer.frame import Frame, FrameMemory, PayloadRoom
from services.worker.engine.transfer.lane import Sent
from services.worker.engine.transfer.piece_window import PieceSent, PieceWindow, WindowBounds
from services.worker.engine.transfer.pieces import OutgoingPiece, PieceRead
from services.worker.errors import WorkerError


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """A piece that is ready to send."""

    number: int  # of the piece
    room: PayloadRoom  # memory of its payload
    frame: Frame


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """A transfer, from `Mover.send` until it is over (`is_over`)."""

    transfer_id: str
    peer: str
    group_id: str
    epoch: int
    pieces: Iterator[OutgoingPiece]  # not packed yet
    packed: PackedPiece | None = None  # the next piece, packed while the lane was full
    ahead: tuple[OutgoingPiece, PieceRead | None] | None = None  # the piece after it, if read early
    complete: bool = False  # whether its last piece is packed
    ended: str | None = None  # the reason, once abandoned
    size_bytes: int = 0  # sent so far
    unanswered: dict[int, PieceSent] = field(default_factory=dict)  # by piece number
    sends: deque[tuple[Sent, PayloadRoom]] = field(default_factory=deque)  # not recycled yet

    @property
    def has_more(self) -> bool:
        """Whether a piece is left to send."""
        return self.ended is None and (self.packed is not None or not self.complete)

    @property
    def is_over(self) -> bool:
        """Whether it is answered or abandoned, and no send reads its memory any more."""
        answered = self.complete and self.packed is None and not self.unanswered
        return not self.sends and (self.ended is not None or answered)

    def take_piece(self) -> tuple[OutgoingPiece, PieceRead | None] | None:
        """Return the next piece to pack, and its copy if that was started; None without a piece."""
        if self.ahead is not None:
            taken, self.ahead = self.ahead, None
            return taken
        piece = next(self.pieces, None)
        return None if piece is None else (piece, None)

    def read_ahead(self) -> None:
        """Start to read the next piece, so that the device copies it while others are sent."""
        piece = next(self.pieces, None)
        if piece is None:
            return
        try:
            read = None if piece.read is None else piece.read()
        except WorkerError:
            read = None  # packing it will fail, unless the reason is gone by then
        self.ahead = piece, read

    def discard_ahead(self) -> None:
        """Forget the piece that was read early."""
        if self.ahead is not None and self.ahead[1] is not None:
            self.ahead[1].discard()
        self.ahead = None

    def forget_done_sends(self, memory: FrameMemory) -> str | None:
        """Recycle the memory of completed sends; returns their first error, or None."""
        problem = None
        while self.sends and self.sends[0][0].done:
            sent, room = self.sends.popleft()
            memory.give_back(room.memory)
            error = sent.error
            problem = problem or (str(error) if error is not None else None)
        return problem

    def oldest_s(self) -> float | None:
        """Return when the oldest unanswered piece was sent; None if no answer is due."""
        if self.ended is not None:
            return None
        return min((piece.sent_s for piece in self.unanswered.values()), default=None)


class OutgoingTransfers:
    """Outgoing transfers by peer. The first `active_max` of each peer send pieces in turn."""

    def __init__(self, active_max: int, bounds: WindowBounds) -> None:
        self._active_max = active_max
        self._bounds = bounds
        self._windows: dict[str, PieceWindow] = {}  # by peer
        self._active: dict[str, deque[OutgoingTransfer]] = {}  # by peer, in order of turns
        self._waiting: dict[str, deque[OutgoingTransfer]] = {}  # by peer, FIFO
        self._by_id: dict[str, OutgoingTransfer] = {}
        self._turns: deque[str] = deque()  # peers in order of turns

    def add(self, transfer: OutgoingTransfer) -> None:
        """Queue a transfer, whose id must be new."""
        self._by_id[transfer.transfer_id] = transfer
        if transfer.peer not in self._active:
            self._active[transfer.peer] = deque()
            self._waiting[transfer.peer] = deque()
            self._windows[transfer.peer] = PieceWindow(self._bounds)
            self._turns.append(transfer.peer)
        self._waiting[transfer.peer].append(transfer)
        self._promote(transfer.peer)

    def find(self, transfer_id: str) -> OutgoingTransfer | None:
        """Return the transfer with that id, or None."""
        return self._by_id.get(transfer_id)

    def all(self) -> list[OutgoingTransfer]:
        """All transfers, oldest first."""
        return list(self._by_id.values())

    def active(self) -> list[OutgoingTransfer]:
        """The transfers that send in turn; all other transfers have not sent a piece yet."""
        return [transfer for active in self._active.values() for transfer in active]

    def has_turn(self) -> bool:
        """Whether any transfer has a piece that its peer's window allows now."""
        return any(
            self._has_room(peer) and any(transfer.has_more for transfer in active)
            for peer, active in self._active.items()
        )

    def next_turn(self) -> OutgoingTransfer | None:
        """Return the transfer that sends next: round-robin over peers and a peer's transfers."""
        for _ in range(len(self._turns)):
            peer = self._turns[0]
            self._turns.rotate(-1)
            active = self._active[peer]
            for _ in range(len(active) if self._has_room(peer) else 0):
                transfer = active[0]
                active.rotate(-1)
                if transfer.has_more:
                    return transfer
        return None

    def piece_bytes(self, peer: str) -> int:
        """Return the size of the next piece to a peer."""
        window = self._windows.get(peer)
        return self._bounds.piece_bytes if window is None else window.piece_bytes

    def note_sent(self, transfer: OutgoingTransfer, packed: PackedPiece, now_s: float) -> None:
        """Record that a piece was handed to the lane."""
        size_bytes = packed.room.payload.size
        transfer.unanswered[packed.number] = self._windows[transfer.peer].note_sent(
            size_bytes, now_s
        )
        transfer.size_bytes += size_bytes

    def note_answered(self, transfer: OutgoingTransfer, piece: int, now_s: float) -> None:
        """Record a receiver's answer to a piece; duplicates are ignored."""
        sent = transfer.unanswered.pop(piece, None)
        if sent is not None:
            self._windows[transfer.peer].note_answered(sent, now_s)

    def remove(self, transfer: OutgoingTransfer) -> None:
        """Forget a transfer; the next waiting transfer of its peer becomes active."""
        peer = transfer.peer
        del self._by_id[transfer.transfer_id]
        for sent in transfer.unanswered.values():
            self._windows[peer].forget(sent)
        for queue in (self._active[peer], self._waiting[peer]):
            if transfer in queue:
                queue.remove(transfer)
        self._promote(peer)
        if not self._active[peer]:
            del self._active[peer], self._waiting[peer], self._windows[peer]
            self._turns.remove(peer)

    def _has_room(self, peer: str) -> bool:
        return self._windows[peer].has_room

    def _promote(self, peer: str) -> None:
        active, waiting = self._active[peer], self._waiting[peer]
        while waiting and len(active) < self._active_max:
            active.append(waiting.popleft())
