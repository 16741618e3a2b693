"""Paced mode: iterations that last as long as on another device.

Processes, memory and protocol are real; only the duration of an iteration comes from a device
profile. So compute grows with the number of workers, which it does not do on a machine with two
processors.
"""

import logging
import time
from collections.abc import Callable

from services.common.clock import monotonic_s
from services.core.cost.model import CostModel
from services.core.planner.batch import Batch

log = logging.getLogger(__name__)


class Pacer:
    """Pads every iteration to its modelled cost; counts those that took longer."""

    def __init__(
        self,
        model: CostModel,
        now_s: Callable[[], float] = monotonic_s,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.model = model
        self._now_s = now_s
        self._sleep = sleep
        self.iterations_total = 0
        self.paced_late_total = 0
        self.late_s = 0.0

    def pad(self, batch: Batch, started_s: float, share: float = 1.0) -> None:
        """Sleep until `started_s` plus the cost of `batch`; an abort is noticed only then.

        `share`: the part of the model's layers that this stage runs.
        """
        cost_s = share * self.model.batch_s(
            (chunk.start, len(chunk.token_ids)) for chunk in batch.chunks
        )
        self.iterations_total += 1
        left_s = started_s + cost_s - self._now_s()
        if left_s > 0:
            self._sleep(left_s)
            return
        self.paced_late_total += 1
        self.late_s -= left_s
        # Log at each doubling, so that a long run logs few lines.
        if self.paced_late_total & (self.paced_late_total - 1) == 0:
            log.warning(
                "PACED too late: paced_late_total=%d of %d iterations took longer than the paced"
                " device does, by %.1f ms on average; take a smaller model",
                self.paced_late_total,
                self.iterations_total,
                1e3 * self.late_s / self.paced_late_total,
            )
