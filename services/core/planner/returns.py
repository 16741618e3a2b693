"""Requests that wait at a worker without having begun, which may be given back to the scheduler.

What the scheduler took for room may be gone when a request arrives: those that run have grown. It
would wait for them, however much room another group has by then. So a request that is `returnable`
and has not begun within `RETURN_AFTER_S` goes back, keeps its place in the line by its time of
arrival, and runs wherever there is room first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.planner.sequence import Phase, Sequence

RETURN_AFTER_S = 0.2


@dataclass(slots=True)
class Returns:
    """Since when each such request waits here, the first that came first."""

    _since_s: dict[str, float] = field(default_factory=dict)

    def note(self, sequence: Sequence, now_s: float) -> None:
        """A request has arrived and waits."""
        if sequence.request.returnable:
            self._since_s.pop(sequence.request_id, None)
            self._since_s[sequence.request_id] = now_s

    def due_s(self, sequences: Mapping[str, Sequence]) -> float | None:
        """When the first of them will have waited too long; None if there is none.

        Those that have begun or gone are forgotten.
        """
        while self._since_s:
            request_id, since_s = next(iter(self._since_s.items()))
            if _waits(sequences.get(request_id)):
                return since_s + RETURN_AFTER_S
            del self._since_s[request_id]
        return None

    def take(self, sequences: Mapping[str, Sequence], now_s: float) -> list[Sequence]:
        """Those that have waited too long; they are forgotten."""
        found = []
        while (due_s := self.due_s(sequences)) is not None and due_s <= now_s:
            request_id = next(iter(self._since_s))
            del self._since_s[request_id]
            found.append(sequences[request_id])
        return found


def _waits(sequence: Sequence | None) -> bool:
    return sequence is not None and sequence.phase is Phase.WAITING and not sequence.begun
