"""Replays recorded events through the core's state machines and compares their decisions."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

from services.core.audit.escalation_order import EscalationOrder
from services.core.audit.facts import FACTS
from services.core.audit.record import BATCH, COMMAND, FACT, Recorded
from services.core.audit.refusals import Refusals
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
    OutcomeReported,
    RequestPlaced,
    SendAssignment,
    SendProceed,
    SendRefusal,
    SendTicket,
    ShortfallsReported,
    Ticked,
    Withdrawn,
)

_SCHEDULER = (
    *(Asked, Withdrawn, GatewayGone, GroupJoined, GroupLeft, LoadReported, LoadLost),
    *(ShortfallsReported, OutcomeReported, RequestPlaced, Ticked),
    *(SendTicket, SendAssignment, SendRefusal, SendProceed),
)


def _by_name(*types: type[Any]) -> dict[str, type[Any]]:
    return {cls.__name__: cls for cls in types}


SCHEDULER_TYPES = _by_name(*_SCHEDULER)
WORKER_TYPES = LOGGED | _by_name(*FACTS)
GATEWAY_TYPES = _by_name(*FACTS)
MEMMGR_TYPES = _by_name(*get_args(CoordinatorEvent), *get_args(CoordinatorCommand), *FACTS)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Result of a replay; `difference` describes the first deviating decision, "" if none."""

    events: int
    decisions: int
    difference: str = ""


def replay(
    state: SchedulerState | Changeover | CoordinatorState,
    entries: Iterable[Recorded],
    escalations: EscalationOrder | None = None,
    refusals: Refusals | None = None,
) -> Replayed:
    """Apply the events of `entries` to a new `state` and compare its commands and batches.

    Decisions after the end of the log are not compared. `escalations` checks each plan, `refusals`
    each refusal of a scheduler.
    """
    events = decisions = 0
    expected: list[Any] = []
    for entry in entries:
        if entry.kind == FACT:
            continue
        if entry.kind == COMMAND:
            if not expected:
                return Replayed(events, decisions, f"recorded after event {events}: {entry.value}")
            decided = expected.pop(0)
        elif expected:
            return Replayed(events, decisions, f"not recorded after event {events}: {expected[0]}")
        elif entry.kind == BATCH:
            assert isinstance(state, Changeover)
            decided = _plan(state, entry.value, escalations)
        else:
            events += 1
            expected = list(state.handle(entry.value))
            if refusals is not None:
                assert isinstance(state, SchedulerState)
                refusals.check(state, entry.value, expected)
            continue
        if decided != entry.value:
            difference = f"after event {events}: {decided} instead of {entry.value}"
            return Replayed(events, decisions, difference)
        decisions += 1
    return Replayed(events, decisions)


def _plan(state: Changeover, planned: Planned, escalations: EscalationOrder | None) -> Planned:
    """Plan at the recorded time and return the result in the form of the record."""
    if escalations is not None:
        escalations.before(state.planner)
    microbatch = state.plan(planned.now_s)
    if escalations is not None:
        escalations.after(state.planner)
    return replace(planned, microbatch=microbatch)
