"""Counts finished changes of groups by outcome, for metrics."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from services.core.groups.coordinator import ChangePhase

UPPER_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LAST_PHASES = (ChangePhase.STABLE, ChangePhase.FAILED)
"""Phases after which the requester of a change waits no longer."""


@dataclass(slots=True)
class ChangeCount:
    """Number of changes by outcome, and a histogram of the durations of stable changes."""

    ended: Counter[ChangePhase] = field(
        default_factory=lambda: Counter(dict.fromkeys(LAST_PHASES, 0))
    )
    # Histogram buckets with `UPPER_BOUNDS_S`, and a last bucket without bound.
    counts: list[int] = field(default_factory=lambda: [0] * (len(UPPER_BOUNDS_S) + 1))
    total_s: float = 0.0  # sum of the durations of stable changes

    def note(self, phase: ChangePhase, elapsed_s: float) -> None:
        """Count a change if `phase` ends it; it entered `phase` `elapsed_s` after its request."""
        if phase not in LAST_PHASES:
            return
        self.ended[phase] += 1
        if phase is ChangePhase.STABLE:
            self.counts[bisect_left(UPPER_BOUNDS_S, elapsed_s)] += 1
            self.total_s += elapsed_s
