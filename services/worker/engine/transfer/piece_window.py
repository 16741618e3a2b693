"""Congestion window of the pieces in flight to a peer, and their size.

The window is slightly more than bandwidth × delay. With less the link idles until answers arrive;
more would only queue, and delay activations. The delay is the shortest time until an answer. The
bandwidth is a moving average of what was answered while a piece was in flight; its maximum, as BBR
uses it, would let pieces queue where processors and not links are the bottleneck.

A piece is what the link carries in `PIECE_S`: each piece costs the processors the same, and
activations wait for a single piece at most.
"""

import math
from dataclasses import dataclass, field

PIECES_MIN = 2  # window of at least as many pieces
PIECE_S = 0.001
GAIN = 1.25  # window over bandwidth × delay
SMOOTHING = 0.1  # weight of a new bandwidth sample


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """Limits of a window."""

    piece_bytes: int  # size of pieces at first, and over the slowest link
    piece_bytes_max: int  # over the fastest link
    pieces_max: int  # in flight
    bytes_max: int  # in flight


@dataclass(frozen=True, slots=True)
class PieceSent:
    """A piece in flight."""

    size_bytes: int
    sent_s: float
    answered_bytes: int  # of the peer in total, by then


@dataclass(slots=True)
class PieceWindow:
    """The window of a peer."""

    bounds: WindowBounds
    piece_bytes: int = field(init=False)  # size of the next piece
    limit_bytes: int = field(init=False)  # soft limit of bytes in flight: the last piece may exceed
    _pieces: int = 0  # in flight
    _bytes: int = 0  # in flight
    _answered_bytes: int = 0  # in total
    _bytes_per_s: float = 0.0  # smoothed bandwidth
    _delay_s: float = math.inf  # shortest time until an answer

    def __post_init__(self) -> None:
        self.piece_bytes = self.bounds.piece_bytes
        self.limit_bytes = min(self.bounds.bytes_max, PIECES_MIN * self.piece_bytes)

    @property
    def has_room(self) -> bool:
        """Whether another piece may be sent."""
        return self._pieces < self.bounds.pieces_max and self._bytes < self.limit_bytes

    def depart(self, size_bytes: int, now_s: float) -> PieceSent:
        """Note that a piece was sent."""
        self._pieces += 1
        self._bytes += size_bytes
        return PieceSent(size_bytes, now_s, self._answered_bytes)

    def forget(self, piece: PieceSent) -> None:
        """Remove a piece whose answer is not needed any more."""
        self._pieces -= 1
        self._bytes -= piece.size_bytes

    def arrive(self, piece: PieceSent, now_s: float) -> None:
        """Note an answer, and update bandwidth, delay, piece size and window."""
        self.forget(piece)
        self._answered_bytes += piece.size_bytes
        delay_s = now_s - piece.sent_s
        if delay_s <= 0:
            return
        # Delay: the minimum excludes queueing. Bandwidth: the bytes answered meanwhile.
        self._delay_s = min(self._delay_s, delay_s)
        bytes_per_s = (self._answered_bytes - piece.answered_bytes) / delay_s
        self._bytes_per_s += SMOOTHING * (bytes_per_s - self._bytes_per_s)
        bounds = self.bounds
        carried = int(self._bytes_per_s * PIECE_S)
        self.piece_bytes = min(bounds.piece_bytes_max, max(bounds.piece_bytes, carried))
        wanted = math.ceil(GAIN * self._bytes_per_s * self._delay_s)
        self.limit_bytes = min(bounds.bytes_max, max(PIECES_MIN * self.piece_bytes, wanted))
