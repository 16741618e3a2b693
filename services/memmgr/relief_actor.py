"""Carries decisions about memory out: plans, and has the group protocol change the groups."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

from services.common.clock import monotonic_s
from services.common.event_log import EventLog
from services.core.audit.facts import ChangePlanned
from services.core.audit.record import FACT
from services.core.memory.backoff import Backoff
from services.core.memory.group_vocabulary import Group, Targets
from services.core.memory.overload_events import Action
from services.memmgr.relief import LoggedDecision
from services.memmgr.relief_plan import Change, NoPlan, merges, splits
from services.memmgr.step import Step, StepPhase
from services.memmgr.worker_facts import WorkerFacts
from services.memmgr.worker_memory import MemoryView

CHANGES_MAX = 32  # that run at the same time

log = logging.getLogger(__name__)


class Changer(Protocol):
    """What `Driver` does for it."""

    facts: dict[str, WorkerFacts]

    @property
    def leads(self) -> bool: ...

    @property
    def stable_groups(self) -> tuple[Group, ...]: ...

    def num_layers(self, worker_id: str) -> int: ...

    def reconfigure(self, targets: Targets) -> AsyncIterator[Step]: ...


class ReliefActor:
    """Acts on decisions while this instance leads.

    A group that is being changed is left out. So is, for a while that doubles, one whose last
    change has failed; a model without a plan is left alone likewise.
    """

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
        self._pauses_s = backoff_s, backoff_max_s
        self._failed = Backoff()  # of workers
        self._planless = Backoff()  # of models
        self._changing: set[str] = set()
        self._slots = asyncio.Semaphore(CHANGES_MAX)
        # One task per change; a group is in one only.
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Own the changes that run, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await asyncio.Event().wait()

    def act(self, logged: LoggedDecision) -> None:
        """Begin what was decided; `logged` hears what becomes of it."""
        model = logged.decision.model
        now_s = monotonic_s()
        if self._tasks is None or not self._driver.leads:
            logged.note(model, "another memory manager leads")
            return
        wait_s = self._planless.wait_s([model], now_s)
        if wait_s > 0:
            logged.note(model, f"there was no plan lately; looked for again in {wait_s:.1f} s")
            return
        try:
            changes = self._plan(logged, now_s)
        except NoPlan as error:
            self._planless.failed([model], now_s, *self._pauses_s)
            logged.note(model, str(error))
            log.info("%s: %s", model, error)
            return
        self._planless.succeeded([model])
        if self._event_log is not None:
            self._event_log.append(FACT, [planned(change, now_s) for change in changes])
        for change in changes:
            self._changing.update(change.group_ids)
            self._tasks.create_task(self._change(change, logged))

    def _plan(self, logged: LoggedDecision, now_s: float) -> list[Change]:
        """Raises NoPlan."""
        decision = logged.decision
        free = [group for group in self._driver.stable_groups if self._is_free(group, now_s)]
        groups = [group for group in free if group.model == decision.model]
        if decision.action is Action.RESTORE:
            chosen = [group for group in groups if group.group_id in decision.group_ids]
            first = [group.members[0].worker_id for group in chosen]
            return splits(chosen, {name: self._driver.num_layers(name) for name in first})
        memory = {one.worker_id: one for one in self._memory.workers()}
        return merges(groups, self._driver.facts, memory, decision.needed_tokens)

    def _is_free(self, group: Group, now_s: float) -> bool:
        names = [member.worker_id for member in group.members]
        busy = bool(group.attempt) or group.group_id in self._changing
        return not busy and self._failed.wait_s(names, now_s) == 0

    async def _change(self, change: Change, logged: LoggedDecision) -> None:
        key = ", ".join(change.group_ids)
        names = [stage.worker_id for target in change.targets for stage in target]
        try:
            async with self._slots:
                phase = StepPhase.PREPARING
                async for step in self._driver.reconfigure(change.targets):
                    phase = step.phase
                    logged.note(key, f"{change.text}: {step.phase}, {step.message}")
                    log.info("%s: %s, %s", change.text, step.phase, step.message)
        finally:
            self._changing.difference_update(change.group_ids)
        if phase is StepPhase.STABLE:
            self._failed.succeeded(names)
        else:
            self._failed.failed(names, monotonic_s(), *self._pauses_s)


def planned(change: Change, now_s: float) -> ChangePlanned:
    """The change as the event log has it."""
    return ChangePlanned(now_s, change.group_ids, change.targets, change.text)
