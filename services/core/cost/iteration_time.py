"""How long iterations took beside what the cost model says, so that its drift can be seen.

A device profile is measured once, on an idle host; what a worker does around its iterations and
what else the host runs is not in it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.core.cost.model import CostModel

SLOWEST_KEPT = 0.99
"""What is left of the slowest time with each one that comes: what held one up, and passed by
itself, counts for some hundreds of them."""


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Seconds of a worker's iterations so far: measured, and as the cost model predicted them.

    Iterations with a chunk of more than one token are `prefill`, the others `decode`.
    """

    prefill_s: float = 0.0
    prefill_predicted_s: float = 0.0
    decode_s: float = 0.0
    decode_predicted_s: float = 0.0


@dataclass(slots=True)
class IterationMeter:
    """Adds up iterations of one worker; none of them without a cost model.

    `slowest_s` is the time of the slowest one lately, in any case.
    """

    cost_model: CostModel | None
    total: IterationTime = IterationTime()
    slowest_s: float = 0.0

    def ran(self, chunks: Iterable[tuple[int, int]], measured_s: float, share: float) -> None:
        """An iteration of (prefix, new) chunks; `share`: the worker's layers of all layers."""
        self.slowest_s = max(SLOWEST_KEPT * self.slowest_s, measured_s)
        if self.cost_model is None:
            return
        chunks = tuple(chunks)
        predicted_s = share * self.cost_model.batch_s(chunks)
        so_far = self.total
        if any(new > 1 for _, new in chunks):
            self.total = IterationTime(
                so_far.prefill_s + measured_s,
                so_far.prefill_predicted_s + predicted_s,
                so_far.decode_s,
                so_far.decode_predicted_s,
            )
        else:
            self.total = IterationTime(
                so_far.prefill_s,
                so_far.prefill_predicted_s,
                so_far.decode_s + measured_s,
                so_far.decode_predicted_s + predicted_s,
            )
