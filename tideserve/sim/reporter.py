"""When a simulated worker tells the scheduler its load: at a change, and as a heartbeat."""

from collections.abc import Callable

from services.core.report import Load, LoadReport
from tideserve.sim.delays import Delays
from tideserve.sim.engine import Simulation

Report = Callable[[LoadReport], None]


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
        self._reported: list[str] = []  # received before the last report, which told it first
        self._told = 0
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

    def tell(self) -> LoadReport:
        """The load now, with a higher number than any report before."""
        self._told += 1
        received = (*self._reported, *self._received)
        return LoadReport(self._name, self._name, self._told, self.epoch, self.load, received)

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
        told = self.tell()
        self._reported, self._received = self._received, []
        self._reported_s = self._simulation.now_s
        self._report(told)
