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

SLICES = 32
"""Parts of an iteration's time between which it can be interrupted, as between layers."""

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

    def pad(
        self,
        batch: Batch,
        started_s: float,
        share: float = 1.0,
        interrupted: Callable[[], bool] | None = None,
    ) -> bool:
        """Sleep until `started_s` plus the cost of `batch`; returns whether that time has passed.

        `share`: the part of the model's layers that this stage runs. `interrupted` is called after
        each of `SLICES` parts of the cost, and ends the sleep once it returns True; without it, an
        abort is noticed only at the end.
        """
        cost_s = share * self.model.batch_s(
            (chunk.start, len(chunk.token_ids)) for chunk in batch.chunks
        )
        left_s = started_s + cost_s - self._now_s()
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
        """Count an iteration that was ready `late_s` after the paced device, if that is not < 0."""
        self.iterations_total += 1
        if late_s < 0:
            return
        self.paced_late_total += 1
        self.late_s += late_s
        # Log at each doubling, so that a long run logs few lines.
        if self.paced_late_total & (self.paced_late_total - 1) == 0:
            log.warning(
                "PACED too late: paced_late_total=%d of %d iterations took longer than the paced"
                " device does, by %.1f ms on average; take a smaller model",
                self.paced_late_total,
                self.iterations_total,
                1e3 * self.late_s / self.paced_late_total,
            )
