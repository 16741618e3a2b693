"""Hand-overs: this worker computes the prompt of a request, another worker its output.

A hand-over is a shipment that begins with the prompt, so that the KV of each chunk is sent while
the next chunk runs (as Splitwise sends layers). The target answers offers only between its own
iterations, so a request is offered as soon as it is the next to start. The request leaves after its
first output token; after any earlier failure it runs on here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.destination import Destination
from services.core.planner.sequence import Phase, Sequence
from services.core.shipments.vocabulary import ShippingPort

TAIL_S = 0.5
"""A request leaves when the rest of its KV can be sent within this many seconds; before, it decodes
here. It waits for the rest at the target, see `WAIT_S` in `incoming.py`."""


@dataclass(slots=True)
class HandOvers:
    """The requests to hand over that have not been offered to their targets yet."""

    port: ShippingPort
    _targets: dict[str, Destination] = field(default_factory=dict)  # by sequence id, oldest first

    def __bool__(self) -> bool:
        return bool(self._targets)

    def expect(self, sequence: Sequence, target: Destination) -> None:
        """Plan to hand a sequence that has just arrived over to `target`, if that is possible."""
        if can_be_handed_over(sequence) and self.port.planner.config.prefix_caching:
            self._targets[sequence.seq_id] = target

    def take_due(self) -> Iterator[tuple[Sequence, Destination]]:
        """Remove and yield the sequences that have started, or start next, with their targets."""
        planner = self.port.planner
        table, config = planner.sequence_table, planner.config
        following = table.next_to_admit(config.max_running, config.overtaken_max)
        for seq_id, target in list(self._targets.items()):
            sequence = planner.sequences.get(seq_id)
            if sequence is not None and not sequence.begun and sequence is not following:
                continue
            del self._targets[seq_id]
            # Skip sequences that have ended or were preempted.
            if sequence is not None and (sequence is following or sequence.phase is Phase.RUNNING):
                yield sequence, target

    def drop(self, worker_id: str = "") -> int:
        """Forget the requests to be handed over to a worker, "": to any; returns their number."""
        kept = {
            seq_id: target
            for seq_id, target in self._targets.items()
            if worker_id and target.worker_id != worker_id
        }
        count, self._targets = len(self._targets) - len(kept), kept
        return count


def can_be_handed_over(sequence: Sequence) -> bool:
    """Whether another worker may compute the output of a sequence, apart from its first token.

    A request that has run elsewhere before is not handed over, so that no request goes back and
    forth.
    """
    request = sequence.request
    return request.resumable and request.limits.max_tokens > 1 and not request.output_ids
