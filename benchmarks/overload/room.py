"""Refusals of requests for which a group had room, from the event log of a scheduler."""

from pathlib import Path
from typing import Any

from services.common.event_log import EventLogError, read_config, read_entries
from services.core.ask import RefusalReason
from services.core.audit.record import COMMAND, FACT
from services.core.scheduler.state_config import StateConfig
from services.core.scheduler.vocabulary import Asked, SendAssignment, SendRefusal, Withdrawn
from tideserve.cli.errors import SystemUnavailable
from tideserve.sim.replay import SCHEDULER_TYPES

FOR_LOAD = (RefusalReason.QUEUE_FULL, RefusalReason.EXPIRED, RefusalReason.TOO_LATE)


def refused_with_room_s(folder: Path) -> list[float]:
    """Times of these refusals on the scheduler's monotonic clock. Raises SystemUnavailable."""
    times_s = list[float]()
    try:
        for path in folder.glob("scheduler-*.jsonl"):
            times_s += _of_log(path)
    except EventLogError as error:
        raise SystemUnavailable(str(error)) from error
    return times_s


def _of_log(path: Path) -> list[float]:
    """Replay a log; after each refusal, ask the state whether a group has room."""
    state = read_config(path, StateConfig).state()
    asks = dict[str, Asked]()
    times_s = list[float]()
    for entry in read_entries(path, SCHEDULER_TYPES):
        if entry.kind in (COMMAND, FACT):
            continue
        event: Any = entry.value
        if isinstance(event, Asked):
            asks[event.request_id] = event
        elif isinstance(event, Withdrawn):
            asks.pop(event.request_id, None)
        for command in state.handle(event):
            if isinstance(command, SendAssignment | SendRefusal):
                ask = asks.pop(command.request_id, None)
                refused = isinstance(command, SendRefusal) and command.reason in FOR_LOAD
                if refused and ask is not None and state.has_room(ask, event.now_s):
                    times_s.append(event.now_s)
    return times_s
