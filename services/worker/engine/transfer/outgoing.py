"""Outgoing transfers: which one sends next, and which pieces the receivers have not answered."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from services.worker.engine.transfer.frame import Frame, FrameMemory, PayloadRoom
from services.worker.engine.transfer.lane import Sent
from services.worker.engine.transfer.piece_window import PieceSent, PieceWindow, WindowBounds
from services.worker.engine.transfer.pieces import OutgoingPiece


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """The frame of a piece, its number, and the memory that has its payload."""

    number: int
    room: PayloadRoom
    frame: Frame


@dataclass(slots=True, eq=False)
class OutgoingTransfer:
    """One transfer. `unanswered` has the pieces that were sent and not answered.

    `ended`: why the transfer was given up. It is kept until no send reads its memory any more.
    """

    transfer_id: str
    peer: str
    group_id: str
    epoch: int
    pieces: Iterator[OutgoingPiece]
    packed: PackedPiece | None = None  # a piece for which the lane had no room
    complete: bool = False  # its last piece is packed
    ended: str | None = None
    size_bytes: int = 0
    unanswered: dict[int, PieceSent] = field(default_factory=dict)
    sends: deque[tuple[Sent, PayloadRoom]] = field(default_factory=deque)

    @property
    def has_more(self) -> bool:
        """Whether a piece is left to send."""
        return self.ended is None and (self.packed is not None or not self.complete)

    @property
    def is_over(self) -> bool:
        """Whether it is sent and answered or given up, and no send reads its memory any more."""
        through = self.complete and self.packed is None and not self.unanswered
        return not self.sends and (self.ended is not None or through)

    def forget_done_sends(self, memory: FrameMemory) -> str | None:
        """Give back what done sends have read; returns why one failed, None if none did."""
        problem = None
        while self.sends and self.sends[0][0].done:
            sent, room = self.sends.popleft()
            memory.give_back(room.memory)
            error = sent.error
            problem = problem or (str(error) if error is not None else None)
        return problem

    def oldest_s(self) -> float | None:
        """When the oldest piece without an answer was sent; None if no answer is due."""
        if self.ended is not None:
            return None
        return min((piece.sent_s for piece in self.unanswered.values()), default=None)


class OutgoingTransfers:
    """Outgoing transfers by peer. A few of each peer are active and take turns; the others wait."""

    def __init__(self, active_max: int, bounds: WindowBounds) -> None:
        self._active_max = active_max
        self._bounds = bounds
        self._windows: dict[str, PieceWindow] = {}  # by peer
        self._active: dict[str, deque[OutgoingTransfer]] = {}
        self._waiting: dict[str, deque[OutgoingTransfer]] = {}
        self._by_id: dict[str, OutgoingTransfer] = {}
        self._turns: deque[str] = deque()

    def add(self, transfer: OutgoingTransfer) -> None:
        """Queue a transfer with a new id."""
        self._by_id[transfer.transfer_id] = transfer
        if transfer.peer not in self._active:
            self._active[transfer.peer] = deque()
            self._waiting[transfer.peer] = deque()
            self._windows[transfer.peer] = PieceWindow(self._bounds)
            self._turns.append(transfer.peer)
        self._waiting[transfer.peer].append(transfer)
        self._promote(transfer.peer)

    def find(self, transfer_id: str) -> OutgoingTransfer | None:
        """The transfer of that id."""
        return self._by_id.get(transfer_id)

    def all(self) -> list[OutgoingTransfer]:
        """All transfers, oldest first."""
        return list(self._by_id.values())

    def active(self) -> list[OutgoingTransfer]:
        """The transfers that take turns; no other has sent a piece."""
        return [transfer for active in self._active.values() for transfer in active]

    def has_turn(self) -> bool:
        """Whether a piece may be sent now."""
        return any(
            self._has_room(peer) and any(transfer.has_more for transfer in active)
            for peer, active in self._active.items()
        )

    def next_turn(self) -> OutgoingTransfer | None:
        """The transfer that sends next: peers take turns, and so do the transfers of a peer."""
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
        """The size of the next piece to a peer."""
        window = self._windows.get(peer)
        return self._bounds.piece_bytes if window is None else window.piece_bytes

    def note_sent(self, transfer: OutgoingTransfer, packed: PackedPiece, now_s: float) -> None:
        """A piece is handed to the lane."""
        size_bytes = packed.room.payload.size
        transfer.unanswered[packed.number] = self._windows[transfer.peer].depart(size_bytes, now_s)
        transfer.size_bytes += size_bytes

    def note_answered(self, transfer: OutgoingTransfer, piece: int, now_s: float) -> None:
        """A receiver has taken a piece; a second answer changes nothing."""
        sent = transfer.unanswered.pop(piece, None)
        if sent is not None:
            self._windows[transfer.peer].arrive(sent, now_s)

    def remove(self, transfer: OutgoingTransfer) -> None:
        """Forget a transfer; the next one of its peer becomes active."""
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
