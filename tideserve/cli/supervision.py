"""When a process that died is started again, and when the cluster is given up. Pure."""

import signal
from dataclasses import dataclass, field

from tideserve.cli.errors import EXIT_FAILED, EXIT_UNUSABLE

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 15.0
STEADY_S = 60.0
DEATHS_BEFORE_READY_MAX = 5


@dataclass(frozen=True, slots=True)
class Restart:
    """Start the process again at `at_s`."""

    name: str
    at_s: float
    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop the cluster and end with `exit_code`."""

    name: str
    exit_code: int


@dataclass(slots=True)
class Supervision:
    """Decides what follows from deaths.

    Until the cluster was ready once, a process that calls its configuration or environment
    unusable, or that keeps dying, ends the cluster: repeating would only hide the reason. Later
    every death is answered by a restart, since what worked once can work again.
    """

    ready: bool = False
    _started_s: dict[str, float] = field(default_factory=dict)
    _deaths: dict[str, int] = field(default_factory=dict)
    _due_s: dict[str, float] = field(default_factory=dict)

    def started(self, name: str, now_s: float) -> None:
        """Note that `name` runs since `now_s`."""
        self._started_s[name] = now_s
        self._due_s.pop(name, None)

    def died(self, name: str, return_code: int, now_s: float) -> Restart | GiveUp:
        """Decide what follows from the death of `name`; `return_code` is negative for a signal."""
        if now_s - self._started_s[name] >= STEADY_S:
            self._deaths[name] = 0
        deaths = self._deaths[name] = self._deaths.get(name, 0) + 1
        if not self.ready:
            if return_code == EXIT_UNUSABLE:
                return GiveUp(name, EXIT_UNUSABLE)
            if deaths >= DEATHS_BEFORE_READY_MAX:
                return GiveUp(name, EXIT_FAILED)
        # The exponent is bounded so that a process that dies for days cannot overflow it.
        delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(deaths - 1, 16))
        self._due_s[name] = now_s + delay_s
        return Restart(name, now_s + delay_s, delay_s)

    def due(self, now_s: float) -> list[str]:
        """Names of the dead processes whose time to start again has come."""
        return [name for name, due_s in self._due_s.items() if due_s <= now_s]


def describe_exit(return_code: int) -> str:
    """How a process ended, in words."""
    if return_code >= 0:
        return f"exit code {return_code}"
    try:
        return f"signal {signal.Signals(-return_code).name}"
    except ValueError:
        return f"signal {-return_code}"
