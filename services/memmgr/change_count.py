"""Counts the changes of groups that this memory manager made, by how they ended."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from services.core.groups.coordinator import ChangePhase

UPPER_BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
LAST_PHASES = (ChangePhase.STABLE, ChangePhase.FAILED)


@dataclass(slots=True)
class ChangeCount:
    """Changes by their last step, and the durations of those that became stable."""

    ended: Counter[ChangePhase] = field(
        default_factory=lambda: Counter(dict.fromkeys(LAST_PHASES, 0))
    )
    counts: list[int] = field(default_factory=lambda: [0] * (len(UPPER_BOUNDS_S) + 1))
    total_s: float = 0.0

    def note(self, phase: ChangePhase, elapsed_s: float) -> None:
        """A change has come to `phase`, `elapsed_s` after it was asked for."""
        if phase not in LAST_PHASES:
            return
        self.ended[phase] += 1
        if phase is ChangePhase.STABLE:
            self.counts[bisect_left(UPPER_BOUNDS_S, elapsed_s)] += 1
            self.total_s += elapsed_s
