"""How many pieces may be on their way to a peer: a little more than bandwidth × delay.

With fewer the link is idle until answers come; more would only queue, and activations behind them.
The delay is the shortest until an answer. The bandwidth is smoothed, from the pieces that were
answered while one was under way: its best moments, as BBR takes them, would let pieces queue where
processors and not links are the limit.
"""

import math
from dataclasses import dataclass

PIECES_MIN = 2
GAIN = 1.25
SMOOTHING = 0.1


@dataclass(frozen=True, slots=True)
class PieceSent:
    """When a piece was sent, and how many had been answered by then."""

    sent_s: float
    answered: int


@dataclass(slots=True)
class PieceWindow:
    """For one peer; `most` bounds it."""

    most: int
    limit: int = PIECES_MIN
    _answered: int = 0
    _per_s: float = 0.0
    _delay_s: float = math.inf

    def __post_init__(self) -> None:
        self.limit = min(self.limit, self.most)

    def depart(self, now_s: float) -> PieceSent:
        """A piece is sent."""
        return PieceSent(now_s, self._answered)

    def arrive(self, piece: PieceSent, now_s: float) -> None:
        """A piece is answered."""
        self._answered += 1
        delay_s = now_s - piece.sent_s
        if delay_s <= 0:
            return
        self._delay_s = min(self._delay_s, delay_s)
        per_s = (self._answered - piece.answered) / delay_s
        self._per_s += SMOOTHING * (per_s - self._per_s)
        wanted = math.ceil(GAIN * self._per_s * self._delay_s)
        self.limit = min(self.most, max(PIECES_MIN, wanted))
