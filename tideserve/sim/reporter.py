"""Load reports of a simulated worker, at the times that `services.core.reporting` decides."""

from collections.abc import Callable

from services.core.report import Load, LoadReport
from services.core.reporting import LoadReporting, ReportSchedule
from tideserve.sim.delays import Delays
from tideserve.sim.engine import Simulation

Report = Callable[[LoadReport], None]


class LoadSender:
    """Sends the reports of a worker; `load` and `epoch` are the contents of the next report."""

    def __init__(
        self, name: str, simulation: Simulation, delays: Delays, report: Report, load: Load
    ) -> None:
        self.load = load
        self.epoch = 1
        self._simulation = simulation
        self._report = report
        self._schedule = ReportSchedule(
            delays.report_pause_s, delays.heartbeat_s, delays.report_minor_pause_s
        )
        self._reporting = LoadReporting(name, name, self._schedule)

    def start(self, offset_s: float) -> None:
        """Send the first report `offset_s` from now, and heartbeats after it."""
        self._simulation.after(offset_s, self._heartbeat)

    def publish(self, load: Load, received: list[str], dropped: tuple[int, ...] = ()) -> None:
        """Update the load to report.

        `received`: requests that `load` counts for the first time; `dropped`: see
        `LoadReport.dropped_prefixes`.
        """
        self.load = load
        self._reporting.note_received(*received)
        self._reporting.note_evicted(dropped)
        if self._schedule.note_change(self._reporting.urgency(self.epoch, load)):
            self._simulation.at(
                max(self._schedule.due_s, self._simulation.now_s), self._send_if_due
            )

    def snapshot(self) -> LoadReport:
        """Return a report of the current load outside the stream of reports."""
        return self._reporting.create_out_of_band(self.epoch, self.load)

    def _heartbeat(self) -> None:
        self._send_if_due()
        self._simulation.at(self._schedule.heartbeat_due_s, self._heartbeat)

    def _send_if_due(self) -> None:
        now_s = self._simulation.now_s
        if self._schedule.due_s > now_s:
            return
        if report := self._reporting.create_if_due(self.epoch, self.load, now_s):
            self._report(report)
