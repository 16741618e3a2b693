"""What lies between the services."""

from dataclasses import dataclass

from services.core.setting import seconds


@dataclass(frozen=True, slots=True)
class Delays:
    """In seconds.

    `ask_s` from the client to the scheduler, `start_s` from there to the worker's planner,
    `token_s` from the planner to the client, `report_s` from a worker to the scheduler. A worker
    reports a change at once, but no sooner than `report_pause_s` after its last report, one of the
    blocks in use alone `report_minor_pause_s` after it, and `heartbeat_s` after it in any case.
    """

    ask_s: float = seconds(0.002)
    start_s: float = seconds(0.002)
    token_s: float = seconds(0.001)
    report_s: float = seconds(0.0005)
    report_pause_s: float = seconds(0.005)
    report_minor_pause_s: float = seconds(0.25)
    heartbeat_s: float = seconds(0.5, minimum=0.001)
