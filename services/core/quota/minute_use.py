"""Tokens of an owner at a gateway in any minute: used ones, and those that may still be generated.

The token bucket charges outputs as they grow, so it refuses nothing that started before its debt.
This window bounds what may start: in no minute may the owner use more than `MINUTE_MAX` times its
limit, even if every running output reaches its maximum.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.quota.shared_rate import MINUTE_S

MINUTE_MAX = 1.1
"""Most tokens of an owner in any minute, as a multiple of its limit."""
OUTPUT_PER_S = 100.0
"""Assumed highest speed of an output in tokens per second. Without it, each request without
`max_tokens` would count with the whole context length."""
_SLOT_S = 2.0


@dataclass(slots=True)
class MinuteUse:
    """Tokens used in the last minute, and the maximum of running requests."""

    # Tokens of prompts that no worker has answered yet.
    prompt_tokens: int = 0
    # Running outputs, and tokens that they may still generate together.
    outputs: int = 0
    output_tokens: int = 0
    # Start of a slot and the tokens used in it, oldest first; at most a minute's slots.
    _used: deque[tuple[float, int]] = field(default_factory=deque)

    def note(self, tokens: int, now_s: float) -> None:
        """Count used tokens."""
        start_s = now_s // _SLOT_S * _SLOT_S
        self._expire(now_s)
        if self._used and self._used[-1][0] >= start_s:
            start_s, before = self._used.pop()
            tokens += before
        self._used.append((start_s, tokens))

    def peak(
        self, now_s: float, prompt_tokens: int = 0, outputs: int = 0, output_tokens: int = 0
    ) -> float:
        """Most tokens that any minute from now on can have, with another request or without."""
        self._expire(now_s)
        output_tokens += self.output_tokens
        per_s = OUTPUT_PER_S * (outputs + self.outputs)
        total = self.prompt_tokens + prompt_tokens
        peak = total + min(output_tokens, per_s * MINUTE_S)
        # A slot counts until `start_s + until_s` from now, when it has left the minute.
        until_s = _SLOT_S + MINUTE_S - now_s
        for start_s, tokens in reversed(self._used):
            total += tokens
            peak = max(peak, total + min(output_tokens, per_s * (start_s + until_s)))
        return peak

    def _expire(self, now_s: float) -> None:
        while self._used and self._used[0][0] + _SLOT_S + MINUTE_S <= now_s:
            self._used.popleft()
