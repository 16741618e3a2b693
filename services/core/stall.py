"""When something that comes again and again counts as stalled, and no longer as slow."""

from dataclasses import dataclass

from services.core.cost.iteration_time import SLOWEST_KEPT

STALLED_S = 5.0
STALLED_FACTOR = 10.0
"""How much longer it may take than the slowest one lately."""
_ALARMS_MAX = 10


@dataclass(slots=True)
class StallLimit:
    """The limit by what was seen lately; `least_s`: what has not come for less is only slow.

    Something that was called stalled and was only slow is not so again: the limit doubles with each
    alarm until one comes.
    """

    least_s: float = STALLED_S
    _slowest_s: float = 0.0
    _alarms: int = 0

    @property
    def limit_s(self) -> float:
        """Seconds after which it is stalled."""
        return float(max(self.least_s, STALLED_FACTOR * self._slowest_s) * 2**self._alarms)

    def came(self, took_s: float) -> None:
        """One has come, after so many seconds."""
        self._slowest_s = max(SLOWEST_KEPT * self._slowest_s, took_s)
        self._alarms = 0

    def alarmed(self) -> None:
        """It was called stalled."""
        self._alarms = min(self._alarms + 1, _ALARMS_MAX)
