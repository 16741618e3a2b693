"""Hand-overs: this worker computes the prompt of a request, another one its output.

A hand-over is a shipment that begins with the prompt, so that the KV of each chunk is sent while
the next one runs (as Splitwise sends layers). The target gets the offer when the request is
the next to start, as it answers only between its own iterations. The request leaves after its first
output token. Whatever fails before, it runs on here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from services.core.destination import Destination
from services.core.planner.sequence import Phase, Sequence
from services.core.shipments.vocabulary import ShippingPort

TAIL_S = 0.5
"""Time that the KV may need that is not at the target when the request leaves; with more to send,
it decodes here meanwhile. The request waits for its KV there, see `WAIT_S` in `incoming.py`."""


@dataclass(slots=True)
class HandOvers:
    """The requests to hand over that were not offered to their target yet."""

    port: ShippingPort
    _targets: dict[str, Destination] = field(default_factory=dict)  # by sequence id, oldest first

    def __bool__(self) -> bool:
        return bool(self._targets)

    def expect(self, sequence: Sequence, target: Destination) -> None:
        """Hand a sequence that has just arrived over to `target`, if it can be."""
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
            # It may have ended, or have been preempted already.
            if sequence is not None and (sequence is following or sequence.phase is Phase.RUNNING):
                yield sequence, target

    def drop(self, worker_id: str = "") -> int:
        """Hand none of these requests over, "": to any worker; returns their number."""
        kept = {
            seq_id: target
            for seq_id, target in self._targets.items()
            if worker_id and target.worker_id != worker_id
        }
        count, self._targets = len(self._targets) - len(kept), kept
        return count


def can_be_handed_over(sequence: Sequence) -> bool:
    """Whether another worker may compute the output of a sequence, apart from its first token.

    At most once, so that no request goes back and forth: not if it has run elsewhere before.
    """
    request = sequence.request
    return request.resumable and request.limits.max_tokens > 1 and not request.output_ids
