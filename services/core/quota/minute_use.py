"""Tokens in a sliding minute."""

from collections import deque
from dataclasses import dataclass, field

from services.core.quota.shared_rate import MINUTE_S

MINUTE_MAX = 1.1
"""Most tokens of an owner in any minute, as a multiple of its limit."""
_SLOT_S = 1.0


@dataclass(slots=True)
class MinuteUse:
    """A sum over the last minute; amounts count up to a second longer."""

    _total: int = 0
    # Start of a slot and the tokens counted in it, oldest first; at most a minute's slots.
    _slots: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, tokens: int, now_s: float) -> None:
        """Count tokens."""
        start_s = now_s // _SLOT_S * _SLOT_S
        self._total = self.total(now_s) + tokens
        if self._slots and self._slots[-1][0] >= start_s:
            start_s, before = self._slots.pop()
            tokens += before
        self._slots.append((start_s, tokens))

    def take_back(self, tokens: int, noted_s: float) -> None:
        """Remove tokens that were counted at `noted_s`, unless they have left the minute."""
        for index in range(len(self._slots) - 1, -1, -1):
            start_s, before = self._slots[index]
            if start_s <= noted_s:
                self._slots[index] = (start_s, before - tokens)
                self._total -= tokens
                return

    def total(self, now_s: float) -> int:
        """Tokens of the last minute."""
        while self._slots and self._slots[0][0] + _SLOT_S + MINUTE_S <= now_s:
            self._total -= self._slots.popleft()[1]
        return self._total

    def wait_s(self, tokens: float, now_s: float) -> float:
        """Seconds until so many tokens have left the minute; a minute if there are fewer."""
        for start_s, counted in self._slots:
            tokens -= counted
            if tokens <= 0:
                return max(0.0, start_s + _SLOT_S + MINUTE_S - now_s)
        return MINUTE_S + _SLOT_S
