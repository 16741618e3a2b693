"""When a simulated worker tells the scheduler its load: at a change, and as a heartbeat."""

from collections.abc import Callable

from services.core.iteration.events import Load
from sim.delays import Delays
from sim.engine import Simulation

Report = Callable[[str, int, Load, tuple[str, ...]], None]
"""Takes a worker's name, its epoch, its load and the requests that this counts for the first time.
"""


class Reporter:
    """Sends a change at once; those soon after a report travel in the next one."""

    def __init__(
        self, name: str, simulation: Simulation, delays: Delays, report: Report, load: Load
    ) -> None:
        self.load = load
        self.epoch = 1
        self._name = name
        self._simulation = simulation
        self._delays = delays
        self._report = report
        self._received: list[str] = []
        self._is_due = False
        self._reported_s = 0.0

    def start(self, offset_s: float) -> None:
        """Report for the first time, `offset_s` from now; then go on with heartbeats."""
        self._simulation.after(offset_s, self._heartbeat)

    def publish(self, load: Load, received: list[str]) -> None:
        """The load becomes visible, with the requests that it counts for the first time."""
        self.load = load
        self._received += received
        if not self._is_due:
            self._is_due = True
            due_s = self._reported_s + self._delays.report_pause_s
            self._simulation.at(max(due_s, self._simulation.now_s), self._report_change)

    def _report_change(self) -> None:
        self._is_due = False
        self._send()

    def _heartbeat(self) -> None:
        due_s = self._reported_s + self._delays.heartbeat_s
        if due_s <= self._simulation.now_s or not self._reported_s:
            self._send()
            due_s = self._simulation.now_s + self._delays.heartbeat_s
        self._simulation.at(due_s, self._heartbeat)

    def _send(self) -> None:
        received, self._received = self._received, []
        self._reported_s = self._simulation.now_s
        self._report(self._name, self.epoch, self.load, tuple(received))
