"""Paced mode, for experiments: every iteration lasts as long as it would on another device.

The engine computes as usual and then sleeps until the time that a profile of the other device
predicts. Workers that share a few CPUs can thus have the capacity of as many devices.
"""

import logging
import time
from collections.abc import Callable

from services.common.clock import monotonic_s
from services.core.cost.model import CostModel
from services.core.cost.padded import Execution
from services.core.planner.batch import Batch

SLICES = 32
"""Slices of the predicted time; the sleep can be interrupted between two slices."""

log = logging.getLogger(__name__)


class Pacer:
    """Pads every iteration to its predicted time; counts the iterations that took longer."""

    def __init__(
        self,
        model: CostModel,
        now_s: Callable[[], float] = monotonic_s,
        sleep: Callable[[float], None] = time.sleep,
        *,
        execution: Execution = Execution.RAGGED,
    ) -> None:
        """`execution`: how the simulated device pads."""
        self.model = model
        self._execution = execution
        self._now_s = now_s
        self._sleep = sleep
        self.iterations_total = 0
        self.paced_late_total = 0
        self.late_s = 0.0

    def pad(
        self,
        batch: Batch,
        started_s: float,
        share: float = 1.0,
        interrupted: Callable[[], bool] | None = None,
    ) -> bool:
        """Sleep until `started_s` plus the predicted time of `batch`; returns False if interrupted.

        `share`: the fraction of the model's layers in this stage. `interrupted` is called after
        each of `SLICES` parts of the time and ends the sleep if it returns True.
        """
        chunks = [(chunk.start, len(chunk.token_ids)) for chunk in batch.chunks]
        cost_s = share * self.model.batch_s(self._execution.chunks(chunks))
        left_s = started_s + cost_s - self._now_s()
        # Positive if computing took longer than on the device of the profile.
        late_s = -left_s
        while left_s > 0:
            self._sleep(left_s if interrupted is None else min(left_s, cost_s / SLICES))
            if interrupted is None:
                break
            if interrupted():
                return False
            left_s = started_s + cost_s - self._now_s()
        self._count(late_s)
        return True

    def _count(self, late_s: float) -> None:
        """Count an iteration, as late unless `late_s` is negative."""
        self.iterations_total += 1
        if late_s < 0:
            return
        self.paced_late_total += 1
        self.late_s += late_s
        # Log when the count reaches a power of two, so that a long run logs few lines.
        if self.paced_late_total & (self.paced_late_total - 1) == 0:
            log.warning(
                "PACED too late: paced_late_total=%d of %d iterations took longer than the paced"
                " device does, by %.1f ms on average; take a smaller model",
                self.paced_late_total,
                self.iterations_total,
                1e3 * self.late_s / self.paced_late_total,
            )
