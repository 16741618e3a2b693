"""Rates of the last moments from counters that only grow. Pure."""

from collections import deque

from services.gateway.records.metrics import EndpointTotals

WINDOW_S = 2.0


class Pulse:
    """Tokens a second and time to first token over the last `WINDOW_S`.

    It is told at most some times a second, so that it keeps few looks.
    """

    def __init__(self) -> None:
        self._looks: deque[tuple[float, EndpointTotals]] = deque(maxlen=64)

    def note(self, now_s: float, totals: EndpointTotals) -> None:
        """What the counters show at `now_s`."""
        self._looks.append((now_s, totals))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second; 0 before the second look."""
        (began_s, first), (now_s, last) = self._ends()
        elapsed_s = now_s - began_s
        return (last.output_tokens - first.output_tokens) / elapsed_s if elapsed_s > 0 else 0.0

    @property
    def ttft_s(self) -> float | None:
        """Mean time to first token of the requests that got theirs; None if none did."""
        (_, first), (_, last) = self._ends()
        count = last.first_tokens - first.first_tokens
        return (last.first_tokens_s - first.first_tokens_s) / count if count else None

    def _ends(self) -> tuple[tuple[float, EndpointTotals], tuple[float, EndpointTotals]]:
        nothing = (0.0, EndpointTotals(0, 0, 0.0))
        if not self._looks:
            return nothing, nothing
        return self._looks[0], self._looks[-1]
