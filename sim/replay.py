"""Feeds recorded events to the same core code again: it must decide the same again."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from services.core.iteration.batch import Microbatch
from services.core.iteration.events import (
    EmitToken,
    IterationDropped,
    IterationFinished,
    RefuseRequest,
    RequestAborted,
    RequestArrived,
)
from services.core.iteration.state import IterationState
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import (
    Asked,
    GatewayGone,
    GroupJoined,
    GroupLeft,
    LoadLost,
    LoadReported,
    SendAssignment,
    SendRefusal,
    SendTicket,
    Ticked,
    Withdrawn,
)

EVENT, COMMAND, BATCH = "event", "command", "batch"
"""Kinds of entries; a microbatch is the answer to a call of `plan`."""

_SCHEDULER = (
    *(Asked, Withdrawn, GatewayGone, GroupJoined, GroupLeft, LoadReported, LoadLost, Ticked),
    *(SendTicket, SendAssignment, SendRefusal),
)
_WORKER = (
    *(RequestArrived, RequestAborted, IterationFinished, IterationDropped),
    *(EmitToken, RefuseRequest, Microbatch),
)
SCHEDULER_TYPES: dict[str, type[Any]] = {one.__name__: one for one in _SCHEDULER}
WORKER_TYPES: dict[str, type[Any]] = {one.__name__: one for one in _WORKER}
WORKER_TYPES["NoneType"] = type(None)


class Recorded(Protocol):
    """An entry of an event log."""

    @property
    def kind(self) -> str:
        """One of the kinds above."""
        ...

    @property
    def value(self) -> Any:
        """The event, command or batch."""
        ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a replay came; `difference` says where it first decided otherwise, "" if nowhere."""

    events: int
    decisions: int
    difference: str = ""


def replay(state: SchedulerState | IterationState, entries: Iterable[Recorded]) -> Replayed:
    """Apply the events of `entries` to a new `state`, compare commands and batches.

    What the end of the log cuts off is not compared.
    """
    events = decisions = 0
    expected: list[Any] = []
    for entry in entries:
        if entry.kind == COMMAND:
            if not expected:
                return Replayed(events, decisions, f"recorded after event {events}: {entry.value}")
            made = expected.pop(0)
        elif expected:
            return Replayed(events, decisions, f"not recorded after event {events}: {expected[0]}")
        elif entry.kind == BATCH:
            assert isinstance(state, IterationState)
            made = state.plan()
        else:
            events += 1
            expected = list(state.handle(entry.value))
            continue
        if made != entry.value:
            difference = f"after event {events}: {made} instead of {entry.value}"
            return Replayed(events, decisions, difference)
        decisions += 1
    return Replayed(events, decisions)
