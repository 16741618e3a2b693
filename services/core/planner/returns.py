"""Requests that wait at a worker without having begun, which may be given back to the scheduler.

The room that the scheduler saw may be gone when a request arrives, since running requests grow. The
request would wait for these, however much room another group has by then. So a request that is
`returnable` and has not begun within `RETURN_AFTER_S` goes back, keeps its place in the line by its
time of arrival, and runs wherever there is room first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.planner.sequence import Phase, Sequence

RETURN_AFTER_S = 0.2


@dataclass(slots=True)
class Returns:
    """The returnable requests that wait, with the times of their arrival here, oldest first."""

    _since_s: dict[str, float] = field(default_factory=dict)

    def note(self, sequence: Sequence, now_s: float, sequences: Mapping[str, Sequence]) -> None:
        """A request has arrived and waits. The oldest that have begun or gone are forgotten."""
        while self._since_s and not _may_wait(sequences.get(first := next(iter(self._since_s)))):
            del self._since_s[first]
        if sequence.request.returnable:
            self._since_s.pop(sequence.request_id, None)
            self._since_s[sequence.request_id] = now_s

    def due_s(self, sequences: Mapping[str, Sequence]) -> float | None:
        """When the first of them will have waited too long; None if there is none."""
        for request_id, since_s in self._since_s.items():
            if _waits(sequences.get(request_id)):
                return since_s + RETURN_AFTER_S
        return None

    def take(self, sequences: Mapping[str, Sequence], now_s: float) -> list[Sequence]:
        """The requests that have waited too long; they are forgotten."""
        found = [
            sequences[request_id]
            for request_id, since_s in self._since_s.items()
            if since_s + RETURN_AFTER_S <= now_s and _waits(sequences.get(request_id))
        ]
        for sequence in found:
            del self._since_s[sequence.request_id]
        return found


def _may_wait(sequence: Sequence | None) -> bool:
    """Whether the sequence may wait yet: it has not begun. A held one waits again afterwards."""
    return sequence is not None and not sequence.begun


def _waits(sequence: Sequence | None) -> bool:
    return sequence is not None and not sequence.begun and sequence.phase is Phase.WAITING
