"""Feeds recorded events to the same core code again: it must decide the same again."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from services.core.audit.facts import FACTS
from services.core.audit.record import BATCH, COMMAND, FACT, Recorded
from services.core.audit.relief_order import ReliefOrder
from services.core.changeover.state import Changeover
from services.core.changeover.vocabulary import LOGGED
from services.core.groups.coordinator import Command as CoordinatorCommand
from services.core.groups.coordinator import CoordinatorState
from services.core.groups.coordinator import Event as CoordinatorEvent
from services.core.planner.events import Planned
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
    ShortfallsTold,
    Ticked,
    Withdrawn,
)

_SCHEDULER = (
    *(Asked, Withdrawn, GatewayGone, GroupJoined, GroupLeft, LoadReported, LoadLost),
    *(ShortfallsTold, Ticked),
    *(SendTicket, SendAssignment, SendRefusal),
)


def _by_name(*types: type[Any]) -> dict[str, type[Any]]:
    return {one.__name__: one for one in types}


SCHEDULER_TYPES = _by_name(*_SCHEDULER)
WORKER_TYPES = LOGGED | _by_name(*FACTS)
GATEWAY_TYPES = _by_name(*FACTS)
MEMMGR_TYPES = _by_name(*get_args(CoordinatorEvent), *get_args(CoordinatorCommand), *FACTS)


@dataclass(frozen=True, slots=True)
class Replayed:
    """How far a replay came; `difference` says where it first decided otherwise, "" if nowhere."""

    events: int
    decisions: int
    difference: str = ""


def replay(
    state: SchedulerState | Changeover | CoordinatorState,
    entries: Iterable[Recorded],
    relief: ReliefOrder | None = None,
) -> Replayed:
    """Apply what happened in `entries` to a new `state`, compare commands and batches.

    Decisions that the end of the log cuts off are not compared. `relief` looks at each plan.
    """
    events = decisions = 0
    expected: list[Any] = []
    for entry in entries:
        if entry.kind == FACT:
            continue
        if entry.kind == COMMAND:
            if not expected:
                return Replayed(events, decisions, f"recorded after event {events}: {entry.value}")
            made = expected.pop(0)
        elif expected:
            return Replayed(events, decisions, f"not recorded after event {events}: {expected[0]}")
        elif entry.kind == BATCH:
            assert isinstance(state, Changeover)
            made = _plan(state, entry.value, relief)
        else:
            events += 1
            expected = list(state.handle(entry.value))
            continue
        if made != entry.value:
            difference = f"after event {events}: {made} instead of {entry.value}"
            return Replayed(events, decisions, difference)
        decisions += 1
    return Replayed(events, decisions)


def _plan(state: Changeover, planned: Planned, relief: ReliefOrder | None) -> Planned:
    """What it plans now."""
    if relief is not None:
        relief.before(state.planner)
    microbatch = state.plan(planned.now_s)
    if relief is not None:
        relief.after(state.planner)
    return replace(planned, microbatch=microbatch)
