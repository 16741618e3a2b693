"""How much may be on its way to a peer, and how large pieces are.

A little more than bandwidth × delay is under way. With less the link is idle until answers come;
more would only queue, and activations behind it. The delay is the shortest until an answer. The
bandwidth is smoothed, from what was answered while one piece was under way: its best moments, as
BBR takes them, would let pieces queue where processors and not links are the limit.

A piece is what the link carries in `PIECE_S`: each costs the processors the same, and activations
wait for one at most.
"""

import math
from dataclasses import dataclass, field

PIECES_MIN = 2
PIECE_S = 0.001
GAIN = 1.25
SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """Sizes of a piece over the slowest and the fastest link; what is under way at most."""

    piece_bytes: int
    piece_bytes_max: int
    pieces_max: int
    bytes_max: int


@dataclass(frozen=True, slots=True)
class PieceSent:
    """A piece, when it was sent, and how many bytes had been answered by then."""

    size_bytes: int
    sent_s: float
    answered_bytes: int


@dataclass(slots=True)
class PieceWindow:
    """For one peer. `limit_bytes` may be under way, and the piece that exceeds it."""

    bounds: WindowBounds
    piece_bytes: int = field(init=False)
    limit_bytes: int = field(init=False)
    _pieces: int = 0
    _bytes: int = 0
    _answered_bytes: int = 0
    _bytes_per_s: float = 0.0
    _delay_s: float = math.inf

    def __post_init__(self) -> None:
        self.piece_bytes = self.bounds.piece_bytes
        self.limit_bytes = min(self.bounds.bytes_max, PIECES_MIN * self.piece_bytes)

    @property
    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        return self._pieces < self.bounds.pieces_max and self._bytes < self.limit_bytes

    def depart(self, size_bytes: int, now_s: float) -> PieceSent:
        """A piece is sent."""
        self._pieces += 1
        self._bytes += size_bytes
        return PieceSent(size_bytes, now_s, self._answered_bytes)

    def forget(self, piece: PieceSent) -> None:
        """Nobody waits for the answer to a piece any more."""
        self._pieces -= 1
        self._bytes -= piece.size_bytes

    def arrive(self, piece: PieceSent, now_s: float) -> None:
        """A piece is answered."""
        self.forget(piece)
        self._answered_bytes += piece.size_bytes
        delay_s = now_s - piece.sent_s
        if delay_s <= 0:
            return
        self._delay_s = min(self._delay_s, delay_s)
        bytes_per_s = (self._answered_bytes - piece.answered_bytes) / delay_s
        self._bytes_per_s += SMOOTHING * (bytes_per_s - self._bytes_per_s)
        bounds = self.bounds
        carried = int(self._bytes_per_s * PIECE_S)
        self.piece_bytes = min(bounds.piece_bytes_max, max(bounds.piece_bytes, carried))
        wanted = math.ceil(GAIN * self._bytes_per_s * self._delay_s)
        self.limit_bytes = min(bounds.bytes_max, max(PIECES_MIN * self.piece_bytes, wanted))
