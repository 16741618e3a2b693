"""Executes the overload monitor's decisions: plans merges and splits, starts them at `Driver`."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.common.garbage_collection import gc_paused
from services.core.audit.facts import ChangePlanned
from services.core.audit.record import FACT
from services.core.groups.coordinator import ChangePhase, ChangeStepped
from services.core.groups.vocabulary import Group, Targets
from services.core.overload.action_plan import ActionPlan, Change
from services.core.overload.actions import LOAD_IS_BACK, ActionState
from services.core.overload.events import Action
from services.core.overload.worker_facts import WorkerFacts
from services.memmgr.change_trace import ChangeCause, decision_cause
from services.memmgr.overload_watch import LoggedDecision
from services.memmgr.worker_memory import MemoryView

WORKERS_POLL_S = 0.5  # interval of `note_workers`

log = logging.getLogger(__name__)


class Changer(Protocol):
    """The interface of `Driver` that this module uses."""

    facts: dict[str, WorkerFacts]

    @property
    def leads(self) -> bool: ...

    @property
    def stable_groups(self) -> tuple[Group, ...]: ...

    def reconfigure(self, targets: Targets, cause: ChangeCause) -> AsyncIterator[ChangeStepped]: ...

    def call_off(self, targets: Targets, reason: str) -> None: ...


class ActionRunner:
    """Executes decisions while this memory manager leads; `ActionState` selects the changes."""

    def __init__(
        self,
        driver: Changer,
        memory: MemoryView,
        backoff_s: float,
        backoff_max_s: float,
        event_log: EventLog | None = None,
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._event_log = event_log
        self._state = ActionState(backoff_s, backoff_max_s)
        # A task per change in progress; `ActionState` bounds their number.
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Run the tasks of changes in progress, and call `note_workers`, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            while True:
                self.note_workers()
                await asyncio.sleep(WORKERS_POLL_S)

    def note_workers(self) -> None:
        """Record which workers report now, for flap damping."""
        now_s = monotonic_s()
        reports = self._memory.fresh(now_s)
        incarnations = {name: report.incarnation for name, report in reports.items()}
        self._state.note_workers(incarnations, now_s)

    def act(self, logged: LoggedDecision) -> ActionPlan | None:
        """Start the changes of a decision, and record their progress in `logged`.

        Returns the plan; None if this memory manager does not lead or has stopped, or if the
        decision cancels splits.
        """
        decision, driver = logged.decision, self._driver
        if self._tasks is None or not driver.leads:
            logged.note(decision.model, "another memory manager leads")
            return None
        if decision.action is Action.CALL_OFF:
            self._call_off(logged)
            return None
        now_s = monotonic_s()
        # A garbage collection of the objects of a large cluster takes longer than planning.
        with gc_paused():
            plan = self._state.begin(
                decision, driver.stable_groups, driver.facts, self._memory.engines(now_s), now_s
            )
        if not plan.changes:
            logged.note(decision.model, plan.reason)
            log.info("%s: %s", decision.model, plan.reason)
            return plan
        if self._event_log is not None:
            self._event_log.append(FACT, [planned_fact(change, now_s) for change in plan.changes])
        for change in plan.changes:
            cause = decision_cause(decision, change)
            self._tasks.create_task(self._change(change, cause, logged))
        return plan

    @property
    def busy(self) -> dict[str, str]:
        """Why groups cannot change now, by group; see `ActionState.busy`."""
        return self._state.busy(self._driver.stable_groups, monotonic_s())

    def _call_off(self, logged: LoggedDecision) -> None:
        for change in self._state.to_call_off(logged.decision):
            logged.note(", ".join(change.group_ids), f"{change.text}: {LOAD_IS_BACK}")
            self._driver.call_off(change.targets, LOAD_IS_BACK)

    async def _change(self, change: Change, cause: ChangeCause, logged: LoggedDecision) -> None:
        key = ", ".join(change.group_ids)
        phase = ChangePhase.FAILED
        try:
            async for step in self._driver.reconfigure(change.targets, cause):
                phase = step.phase
                logged.note(key, f"{change.text}: {step.phase}, {step.message}")
                log.info("%s: %s, %s", change.text, step.phase, step.message)
        finally:
            self._state.ended(change, phase is ChangePhase.STABLE, monotonic_s())


def planned_fact(change: Change, now_s: float) -> ChangePlanned:
    """The event log's entry for a planned change."""
    return ChangePlanned(now_s, change.group_ids, change.targets, change.text)
