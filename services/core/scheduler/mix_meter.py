"""Measures how much of a model's load is prompts and how much answers, for roles of workers."""

from collections import deque
from dataclasses import dataclass, field

from services.core.scheduler.rate import RecentSum

WINDOW_S = 10
"""Window of the rates, in seconds."""


@dataclass(slots=True)
class MixMeter:
    """Tokens of the prompts that started lately, and of the answers that are expected of them."""

    _prompts: RecentSum = field(default_factory=lambda: RecentSum(WINDOW_S))
    _outputs: RecentSum = field(default_factory=lambda: RecentSum(WINDOW_S))
    # Times and targets of requests, ascending in both: the first is the tightest in the window.
    _targets: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=1024))

    def note(self, computed: int, expected: float, tpot_s: float | None, now_s: float) -> None:
        """Count a request with `computed` prompt tokens to compute and `expected` output tokens."""
        self._prompts.add(computed, now_s)
        self._outputs.add(round(expected), now_s)
        if tpot_s is None:
            return
        while self._targets and self._targets[-1][1] >= tpot_s:
            self._targets.pop()
        self._targets.append((now_s, tpot_s))

    def rates(self, now_s: float) -> tuple[float, float]:
        """Prompt and output tokens per second."""
        return self._prompts.per_s(now_s), self._outputs.per_s(now_s)

    def tpot_s(self, now_s: float) -> float:
        """The tightest target of a time per token, in seconds; 0 if no request has one."""
        while self._targets and self._targets[0][0] <= now_s - WINDOW_S:
            self._targets.popleft()
        return self._targets[0][1] if self._targets else 0.0
