"""Sums up a worker's iteration times, measured and predicted, for its metrics.

The cost model may be fitted to a device profile, measured once on an idle host. It then includes
neither the worker's work around iterations nor other load, so the two sums may drift apart.
"""

from dataclasses import dataclass

from services.core.cost.model import Chunks, CostModel

SLOWEST_KEPT = 0.99
"""Factor by which `slowest_s` decays in each iteration: an outlier lasts for some hundred."""


@dataclass(frozen=True, slots=True)
class IterationTime:
    """Accumulated seconds of a worker's iterations: measured, and predicted by the cost model.

    Iterations with a chunk of more than one token count as `prefill`, the others as `decode`.
    """

    prefill_s: float = 0.0
    prefill_predicted_s: float = 0.0
    decode_s: float = 0.0
    decode_predicted_s: float = 0.0


@dataclass(slots=True)
class IterationMeter:
    """Accumulates the iteration times of a worker; without a cost model, `total` stays 0.

    `slowest_s` is the decaying time of the slowest recent iteration.
    """

    cost_model: CostModel | None
    total: IterationTime = IterationTime()
    slowest_s: float = 0.0

    def add(self, chunks: Chunks, measured_s: float, share: float) -> float:
        """Add an iteration of (cached, new) tokens per chunk; `share`: of layers that run here.

        Returns its predicted time, 0 without a cost model.
        """
        self.slowest_s = max(SLOWEST_KEPT * self.slowest_s, measured_s)
        if self.cost_model is None:
            return 0.0
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
        return predicted_s
