"""Congestion window for the pieces of bulk transfers to a peer, and the size of the pieces.

The window is slightly more than bandwidth × delay. With less, the link would idle until answers
arrive; with more, pieces would queue and delay activations. The delay is the shortest time until an
answer. The bandwidth is a moving average of the bytes answered while a piece was in flight. BBR
uses the maximum instead, but then pieces would queue where the processors are the bottleneck.

A piece has the size that the link carries in `PIECE_S`: larger pieces cost the processors less per
byte, and activations wait for at most a piece.
"""

import math
from dataclasses import dataclass, field

PIECES_MIN = 2  # minimum window, in pieces
PIECE_S = 0.001  # time of a piece on the link
GAIN = 1.25  # window over bandwidth × delay
SMOOTHING = 0.1  # weight of a new bandwidth sample


@dataclass(frozen=True, slots=True)
class WindowBounds:
    """Limits of a window."""

    piece_bytes: int  # initial and minimum size of pieces
    piece_bytes_max: int  # maximum size of pieces
    pieces_max: int  # in flight
    bytes_max: int  # in flight


@dataclass(frozen=True, slots=True)
class PieceSent:
    """A piece in flight."""

    size_bytes: int
    sent_s: float
    answered_bytes: int  # total bytes that the peer had answered at `sent_s`


@dataclass(slots=True)
class PieceWindow:
    """The window of a peer."""

    bounds: WindowBounds
    piece_bytes: int = field(init=False)  # size of the next piece
    limit_bytes: int = field(init=False)  # limit of bytes in flight; the last piece may exceed it
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

    def note_sent(self, size_bytes: int, now_s: float) -> PieceSent:
        """Record that a piece was sent."""
        self._pieces += 1
        self._bytes += size_bytes
        return PieceSent(size_bytes, now_s, self._answered_bytes)

    def forget(self, piece: PieceSent) -> None:
        """Remove a piece whose answer is not needed any more."""
        self._pieces -= 1
        self._bytes -= piece.size_bytes

    def note_answered(self, piece: PieceSent, now_s: float) -> None:
        """Record an answer; updates bandwidth, delay, piece size and window."""
        self.forget(piece)
        self._answered_bytes += piece.size_bytes
        delay_s = now_s - piece.sent_s
        if delay_s <= 0:
            return
        # The minimum delay excludes time in queues. The bandwidth is what was answered meanwhile.
        self._delay_s = min(self._delay_s, delay_s)
        bytes_per_s = (self._answered_bytes - piece.answered_bytes) / delay_s
        self._bytes_per_s += SMOOTHING * (bytes_per_s - self._bytes_per_s)
        bounds = self.bounds
        carried = int(self._bytes_per_s * PIECE_S)
        self.piece_bytes = min(bounds.piece_bytes_max, max(bounds.piece_bytes, carried))
        wanted = math.ceil(GAIN * self._bytes_per_s * self._delay_s)
        self.limit_bytes = min(bounds.bytes_max, max(PIECES_MIN * self.piece_bytes, wanted))
