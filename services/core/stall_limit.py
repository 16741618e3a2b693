"""Adaptive timeout that separates stalled from slow iterations and other recurring operations."""

from dataclasses import dataclass

from services.core.cost.iteration_time import SLOWEST_KEPT

STALLED_S = 5.0  # seconds
STALLED_FACTOR = 10.0
"""Multiple of the slowest recent duration after which an operation counts as stalled."""
_ALARMS_MAX = 10  # bounds the factor of the limit to 2**10


@dataclass(slots=True)
class StallLimit:
    """Timeout derived from recent durations, and at least `least_s` seconds.

    The limit doubles with each alarm until an operation completes, so that a slow operation does
    not raise the same false alarm again.
    """

    least_s: float = STALLED_S
    _slowest_s: float = 0.0  # slowest recent duration; decays by SLOWEST_KEPT per completion
    _alarms: int = 0  # alarms since the last completion

    @property
    def limit_s(self) -> float:
        """Seconds after which the operation counts as stalled."""
        return float(max(self.least_s, STALLED_FACTOR * self._slowest_s) * 2**self._alarms)

    def note_completed(self, took_s: float) -> None:
        """Note a completion that took `took_s` seconds."""
        self._slowest_s = max(SLOWEST_KEPT * self._slowest_s, took_s)
        self._alarms = 0

    def note_alarm(self) -> None:
        """Note that the operation was reported as stalled."""
        self._alarms = min(self._alarms + 1, _ALARMS_MAX)
