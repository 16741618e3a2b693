"""Delays of messages between the services."""

from dataclasses import dataclass

from services.core.setting import seconds


@dataclass(frozen=True, slots=True)
class Delays:
    """Delays in seconds.

    `ask_s`: client to scheduler; `start_s`: scheduler to the worker's planner; `token_s`: planner
    to client; `report_s`: worker to scheduler. A worker reports a change at once, but at least
    `report_pause_s` after its previous report, or `report_minor_pause_s` if only the number of used
    blocks changed. It reports after `heartbeat_s` in any case.
    """

    ask_s: float = seconds(0.002)
    start_s: float = seconds(0.002)
    token_s: float = seconds(0.001)
    report_s: float = seconds(0.0005)
    report_pause_s: float = seconds(0.005)
    report_minor_pause_s: float = seconds(0.25)
    heartbeat_s: float = seconds(0.5, minimum=0.001)
