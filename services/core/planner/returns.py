"""Requests that wait at a worker without having begun, which may be given back to the scheduler.

The room that the scheduler saw may be gone when a request arrives, since running requests grow. The
request would wait for these, however much room another group has by then. So a request that is
`returnable` and has not begun within `RETURN_AFTER_S` goes back, keeps its place in the line by its
time of arrival, and runs wherever there is room first. So does one that rests at a worker which
leads no longer: that plans nothing, whatever room it has (`ParkedBatch`).

While one could start, none goes back: it waits for the end of an iteration, or for its turn. But
for batch work there may be room and no time, since deadlines leave too little. That wait has no
end that the worker knows. It goes back after as long as it may rest at a worker (`shelf_max_s`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from services.core.planner.sequence import Phase, Sequence

RETURN_AFTER_S = 0.2


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds after which requests that wait go back; `inf`: they stay."""

    online_s: float = inf
    batch_s: float = inf

    @property
    def is_one(self) -> bool:
        """Whether it is the same for both classes, so that the oldest request goes first."""
        return self.online_s == self.batch_s

    def of(self, sequence: Sequence) -> float:
        """How long a sequence may wait."""
        return self.online_s if sequence.online else self.batch_s


ROOM = Patience()
NO_ROOM = Patience(RETURN_AFTER_S, RETURN_AFTER_S)


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

    def any_wait(self, sequences: Mapping[str, Sequence]) -> bool:
        """Whether one of them waits."""
        return next(self._waiting(sequences), None) is not None

    def due_s(self, sequences: Mapping[str, Sequence], patience: Patience) -> float | None:
        """When the first of them will have waited too long; None if none ever will."""
        due_s = inf
        for one, since_s in self._waiting(sequences):
            due_s = min(due_s, since_s + patience.of(one))
            if patience.is_one:
                break
        return due_s if due_s < inf else None

    def take(
        self, sequences: Mapping[str, Sequence], now_s: float, patience: Patience
    ) -> list[Sequence]:
        """The requests that have waited too long; they are forgotten."""
        waiting = self._waiting(sequences)
        found = [one for one, since_s in waiting if since_s + patience.of(one) <= now_s]
        for sequence in found:
            del self._since_s[sequence.request_id]
        return found

    def _waiting(self, sequences: Mapping[str, Sequence]) -> Iterator[tuple[Sequence, float]]:
        for request_id, since_s in self._since_s.items():
            sequence = sequences.get(request_id)
            if sequence is not None and _waits(sequence):
                yield sequence, since_s


def _may_wait(sequence: Sequence | None) -> bool:
    """Whether the sequence may wait yet: it has not begun. A held one waits again afterwards."""
    return sequence is not None and not sequence.begun


def _waits(sequence: Sequence) -> bool:
    return not sequence.begun and sequence.phase is Phase.WAITING
