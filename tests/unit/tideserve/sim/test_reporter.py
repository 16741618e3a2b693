"""Times of a simulated worker's reports: at once, unless it has just reported."""

from services.core.report import Load, LoadReport
from tideserve.sim.delays import Delays
from tideserve.sim.engine import Simulation
from tideserve.sim.reporter import LoadSender


def load(running: int) -> Load:
    return Load(running, 0, 10, 0, 0, 10)


def test_a_change_is_reported_at_once_and_close_successors_together() -> None:
    simulation, reports = Simulation(), []

    def note(report: LoadReport) -> None:
        reports.append((simulation.now_s, report.load.running, report.received_request_ids))

    delays = Delays(report_pause_s=0.5, heartbeat_s=4.0)
    reporter = LoadSender("w", simulation, delays, note, load(0))
    for time_s, running in ((1.0, 1), (1.25, 2), (1.375, 3), (2.0, 4)):
        simulation.at(time_s, reporter.publish, load(running), [f"r{running}"])
    simulation.run(until_s=10.0)
    assert reports == [
        (1.0, 1, ("r1",)),
        (1.5, 3, ("r1", "r2", "r3")),
        (2.0, 4, ("r2", "r3", "r4")),
    ]
