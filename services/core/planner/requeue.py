"""Decides when requests that wait at a worker return to the scheduler, which requeues them.

Running requests grow, so free blocks that the scheduler saw may be taken when a request arrives.
The request would then wait here, even if another group has free blocks. So a `returnable` request
that has not started within `REQUEUE_AFTER_S` returns to the scheduler, keeps its position in the
queue by its arrival time, and starts wherever blocks are free first. The same holds for requests
that are *parked*: kept at a worker that follows another leader and plans nothing.

While any waiting request could start, no request returns: they wait only for the end of an
iteration. Batch requests are an exception, since online deadlines may leave them no time although
blocks are free: they return after `shelf_max_s`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from services.core.planner.sequence import Phase, Sequence

REQUEUE_AFTER_S = 0.2
"""Seconds after which a request that cannot start returns to the scheduler."""


@dataclass(frozen=True, slots=True)
class RequeueDelays:
    """Seconds after which queued requests return to the scheduler, by class; `inf`: never."""

    online_s: float = inf
    batch_s: float = inf

    @property
    def is_uniform(self) -> bool:
        """Whether both classes have the same delay, so that the oldest request is due first."""
        return self.online_s == self.batch_s

    def of(self, sequence: Sequence) -> float:
        """Delay for a sequence."""
        return self.online_s if sequence.online else self.batch_s


KEEP_QUEUED = RequeueDelays()
REQUEUE_SOON = RequeueDelays(REQUEUE_AFTER_S, REQUEUE_AFTER_S)


@dataclass(slots=True)
class RequeueTimers:
    """Tracks returnable requests that have not started, with their arrival times at this worker."""

    _since_s: dict[str, float] = field(default_factory=dict)  # sequence id → arrival, oldest first

    def note(self, sequence: Sequence, now_s: float, sequences: Mapping[str, Sequence]) -> None:
        """Track a new queued request."""
        # Amortised clean-up: forget the oldest entries that have started or ended.
        while self._since_s and not _may_wait(sequences.get(first := next(iter(self._since_s)))):
            del self._since_s[first]
        if sequence.request.returnable:
            self._since_s.pop(sequence.seq_id, None)
            self._since_s[sequence.seq_id] = now_s

    def any_waiting(self, sequences: Mapping[str, Sequence]) -> bool:
        """Whether any tracked request waits."""
        return next(self._waiting(sequences), None) is not None

    def due_s(self, sequences: Mapping[str, Sequence], delays: RequeueDelays) -> float | None:
        """Time at which the first tracked request must return; None if never."""
        due_s = inf
        for sequence, since_s in self._waiting(sequences):
            due_s = min(due_s, since_s + delays.of(sequence))
            if delays.is_uniform:
                break
        return due_s if due_s < inf else None

    def take(
        self, sequences: Mapping[str, Sequence], now_s: float, delays: RequeueDelays
    ) -> list[Sequence]:
        """Stop tracking the requests that must return now; returns them."""
        waiting = self._waiting(sequences)
        due = [seq for seq, since_s in waiting if since_s + delays.of(seq) <= now_s]
        for sequence in due:
            del self._since_s[sequence.seq_id]
        return due

    def _waiting(self, sequences: Mapping[str, Sequence]) -> Iterator[tuple[Sequence, float]]:
        for seq_id, since_s in self._since_s.items():
            sequence = sequences.get(seq_id)
            if sequence is not None and _waits(sequence):
                yield sequence, since_s


def _may_wait(sequence: Sequence | None) -> bool:
    """Whether the sequence has not started or ended; a held sequence may wait again later."""
    return sequence is not None and not sequence.begun


def _waits(sequence: Sequence) -> bool:
    # A sequence whose KV is on its way here has its blocks already.
    return not (sequence.begun or sequence.awaits_kv) and sequence.phase is Phase.WAITING
