"""Owns the coordinator's machine: feeds it events, carries out its commands."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from services.common import failpoint
from services.common.clock import monotonic_s
from services.common.etcd import RETRY_S
from services.common.event_log import EventLog
from services.common.tracing import Tracer
from services.core.audit.record import COMMAND, EVENT
from services.core.groups.coordinator import (
    ENDED,
    ChangeAsked,
    ChangeCalledOff,
    ChangePhase,
    ChangeStepped,
    Command,
    CoordinatorState,
    Event,
    LookAtMembers,
    MemberSeen,
    MembersSeen,
)
from services.core.groups.vocabulary import (
    AbortMember,
    ClusterListed,
    EngineHung,
    Group,
    GroupPhase,
    GroupStuck,
    LeadershipChanged,
    MemberAnswered,
    PrepareMembers,
    Targets,
    TimePassed,
    Transact,
    TransactionFinished,
)
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import MemoryReport
from services.memmgr.change_count import LAST_PHASES, ChangeCount
from services.memmgr.change_trace import ChangeCause, ChangeTrace, restoration
from services.memmgr.cluster_store import ClusterRecords, ClusterStore
from services.memmgr.losses import Losses, LossLog
from services.memmgr.member_client import MemberClient
from services.memmgr.translate_record import WorkerPlace
from services.memmgr.worker_memory import MemoryView

TICK_S = 0.2

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _WaitedChange:
    """A change that somebody waits for, since `began_s`."""

    began_s: float
    steps: asyncio.Queue[ChangeStepped] = field(default_factory=asyncio.Queue)


class Driver:
    """Keeps group records in step with the registered workers, and changes groups on demand.

    All methods run on the event loop's thread. While etcd is away nothing changes.
    """

    def __init__(
        self,
        state: CoordinatorState,
        store: ClusterStore,
        members: MemberClient,
        memory: MemoryView,
        event_log: EventLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._state = state
        self._store = store
        self._members = members
        self._memory = memory
        self._event_log = event_log
        self._tracer = tracer
        self._traces: dict[str, ChangeTrace] = {}  # by change
        self._places: dict[str, WorkerPlace] = {}
        # One task per outstanding transaction, call or look; the state keeps those few.
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._asked: dict[str, _WaitedChange] = {}  # by change
        self._loss_log = LossLog()
        # Facts of the registered workers, by id.
        self.facts: dict[str, WorkerFacts] = {}
        self.changes = ChangeCount()
        self.losses = Losses()
        self.loaded = False

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups that are not dissolved, ordered by id."""
        stored = self._state.records.groups.values()
        live = [one.group for one in stored if one.group.phase is not GroupPhase.DISSOLVED]
        return tuple(sorted(live, key=lambda group: group.group_id))

    @property
    def stable_groups(self) -> tuple[Group, ...]:
        """The groups that serve, ordered by id."""
        return tuple(group for group in self.groups if group.phase is GroupPhase.STABLE)

    @property
    def leads(self) -> bool:
        """Whether this instance decides."""
        return self._state.leads

    def groups_of(self, targets: Targets) -> tuple[Group, ...]:
        """The groups that the workers of `targets` are in now, ordered by id."""
        names = {stage.worker_id for target in targets for stage in target}
        return tuple(
            group
            for group in self.groups
            if any(member.worker_id in names for member in group.members)
        )

    async def run(self) -> None:
        """Follow etcd and decide until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                tasks.create_task(self._tick())
                try:
                    async for cluster in self._store.follow():
                        self._take(cluster)
                finally:
                    self._stopping = True
        finally:
            for trace in self._traces.values():
                trace.end("the memory manager has stopped", self._memory)

    def lead(self, token: int) -> None:
        """This instance decides from now on under `token`, or no longer (0)."""
        self._apply(LeadershipChanged(monotonic_s(), token or None))

    def note_report(self, report: MemoryReport) -> None:
        """A worker has reported; the group that it is in may be in trouble."""
        before = self._memory.latest(report.worker_id)
        self._memory.report(report)
        latest = self._memory.latest(report.worker_id)
        if latest is not None and latest.report is report:
            self._note_hung(report, before.report if before is not None else None)
        engine = report.engine
        if engine.trouble:
            group_id = self._group_of(report.worker_id)
            self._loss_log.note_trouble(report.worker_id, group_id, engine.epoch, engine.trouble)
            self._apply(
                GroupStuck(
                    monotonic_s(),
                    report.worker_id,
                    report.incarnation,
                    engine.epoch,
                    engine.trouble,
                    engine.slowest_iteration_s,
                )
            )

    def _note_hung(self, report: MemoryReport, before: MemoryReport | None) -> None:
        """The engine of a worker may have begun to stand still, or to go on.

        `before`: the last report; None if none is known since the worker has registered.
        """
        name, hung = report.worker_id, report.engine_hung
        knew = before is not None and before.incarnation == report.incarnation
        was_hung = before is not None and before.engine_hung
        if knew and hung == was_hung:
            return
        if hung != was_hung:
            log.warning("the engine of %s %s", name, "stands still" if hung else "goes on")
        self._apply(EngineHung(monotonic_s(), name, report.incarnation, hung))

    async def reconfigure(
        self, targets: Targets, cause: ChangeCause, urgent: bool = False
    ) -> AsyncIterator[ChangeStepped]:
        """Change groups to `targets`; yields how far it is until it is stable or has failed.

        The coordinator ends every change by a deadline. An `urgent` one is not queued.
        """
        change_id, asked = uuid.uuid4().hex, _WaitedChange(monotonic_s())
        self._asked[change_id] = asked
        traceparent = ""
        if self._tracer is not None:
            trace = self._traces[change_id] = ChangeTrace(self._tracer, cause)
            traceparent = trace.context.traceparent
        self._apply(ChangeAsked(monotonic_s(), change_id, targets, urgent, traceparent))
        while True:
            step = await asked.steps.get()
            yield step
            if step.phase in LAST_PHASES:
                return

    def call_off(self, targets: Targets, reason: str) -> None:
        """End the change to `targets` unless it is committed already."""
        self._apply(ChangeCalledOff(monotonic_s(), targets, reason))

    def _group_of(self, worker_id: str) -> str:
        """Its group by the records; its own id if it has none."""
        stored = self._state.records.assignments.get(worker_id)
        return stored.assignment.group_id if stored is not None else worker_id

    def _note_step(self, step: ChangeStepped) -> None:
        asked = self._asked.get(step.change_id)
        if asked is None and step.phase is ChangePhase.FAILED:
            self._loss_log.note_failed(step.change_id, step.message)
        if asked is not None:
            asked.steps.put_nowait(step)
            if step.phase in LAST_PHASES:
                del self._asked[step.change_id]
                self.changes.note(step.phase, monotonic_s() - asked.began_s)
        trace = self._traces.get(step.change_id)
        if trace is not None and step.phase is ChangePhase.COMMITTED and step.epoch is not None:
            trace.committed(step.epoch)
        if trace is not None and step.phase in ENDED:
            del self._traces[step.change_id]
            failed = step.phase is ChangePhase.FAILED
            trace.end(step.message if failed else "", self._memory)

    def _look(self, command: LookAtMembers) -> None:
        members = []
        for worker_id in command.worker_ids:
            latest = self._memory.latest(worker_id)
            if latest is not None:
                settled = latest.settled_s is not None
                members.append(MemberSeen(worker_id, latest.epoch, settled))
        self._apply(MembersSeen(monotonic_s(), command.change_id, tuple(members)))

    async def _look_later(self, command: LookAtMembers) -> None:
        await asyncio.sleep(command.after_s)
        self._look(command)

    def _trace_of(self, attempt: str) -> ChangeTrace | None:
        change_id = self._state.change_of(attempt)
        return self._traces.get(change_id) if change_id is not None else None

    def _note_preparing(self, command: PrepareMembers) -> None:
        if self._tracer is None:
            return
        trace = self._trace_of(command.attempt)
        if trace is None:  # survivors of a lost member restore their layers
            trace = self._traces[command.attempt] = ChangeTrace(self._tracer, restoration(command))
        trace.preparing()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._apply(TimePassed(monotonic_s()))

    def _take(self, cluster: ClusterRecords) -> None:
        listing = cluster.listing
        if cluster.revision >= self._state.records.revision:
            self._places = listing.places
            self.facts = listing.facts
            groups = {group.group_id for group in self.groups}
            self._loss_log.keep_only(listing.facts.keys(), groups)
            self._memory.set_registered(
                {worker.worker_id: worker.incarnation for worker in listing.workers}
            )
        self.loaded = True
        self._apply(
            ClusterListed(
                monotonic_s(),
                cluster.revision,
                listing.workers,
                listing.groups,
                listing.assignments,
                listing.epoch_floor,
                listing.floor_revision,
            )
        )

    def _apply(self, event: Event) -> None:
        if isinstance(event, GroupStuck):
            self.losses.note_trouble(self._state.records, event, int(time.time()))
        commands = self._state.handle(event)
        # Time that passes without a consequence is not logged.
        if self._event_log is not None and (commands or not isinstance(event, TimePassed)):
            self._event_log.append(EVENT, [event])
            self._event_log.append(COMMAND, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        # Without a listing nothing is decided, and listings come while `run` runs.
        match command:
            case Transact():
                self.losses.note_transaction(self._state.records, command, int(time.time()))
                self._start(self._transact(command))
            case PrepareMembers():
                log.info("attempt %s: members are asked to prepare", command.attempt)
                self._loss_log.note_attempt(command)
                self._note_preparing(command)
                failpoint.hit("memmgr.prepare.sent")
                self._start(self._prepare(command))
            case AbortMember():
                log.info("attempt %s of %s is aborted", command.attempt, command.worker_id)
                self._start(self._members.abort(command, self._places))
            case LookAtMembers() if command.after_s:
                self._start(self._look_later(command))
            case LookAtMembers():
                self._look(command)
            case ChangeStepped():
                self._note_step(command)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        if self._stopping:
            coroutine.close()  # the answer of a member came last; the next leader goes on
        else:
            self._tasks.create_task(coroutine)

    async def _transact(self, command: Transact) -> None:
        kind = _kind_of(command)
        failpoint.hit(f"memmgr.{kind}.sent")
        revision = await self._store.write(command)
        failpoint.hit(f"memmgr.{kind}.{'refused' if revision is None else 'applied'}")
        for group in command.groups:
            log.info(
                "%s %s at epoch %d%s: %s",
                group.group_id,
                group.phase,
                group.epoch,
                f", attempt {group.attempt}" if group.attempt else "",
                "committed" if revision is not None else "not committed, reading again",
            )
        if command.forgotten:
            names = ", ".join(command.forgotten)
            done = "done" if revision is not None else "not committed"
            log.info("records of %s, gone for long, are removed: %s", names, done)
        finished = TransactionFinished(monotonic_s(), command.transaction_id, revision)
        self._apply(finished)
        if revision is None:
            # Nothing may have changed, so the listing must be asked for.
            await asyncio.sleep(RETRY_S)
            self._take(await self._store.list_until_answered())

    async def _prepare(self, command: PrepareMembers) -> None:
        def answered(worker_id: str, incarnation: str, ready: bool, reason: str) -> None:
            log.info(
                "attempt %s: %s %s", command.attempt, worker_id, "is ready" if ready else reason
            )
            if (trace := self._trace_of(command.attempt)) is not None:
                trace.answered(worker_id, reason)
            failpoint.hit("memmgr.prepare.answered")
            self._apply(
                MemberAnswered(
                    monotonic_s(), command.attempt, worker_id, incarnation, ready, reason
                )
            )

        await self._members.prepare(command, self._places, answered)


def _kind_of(command: Transact) -> str:
    """What a transaction is for, as the failpoints beside it call it."""
    if any(group.phase is GroupPhase.DEGRADED for group in command.groups):
        return "settle"
    if command.assignments:
        return "commit"
    return "mark" if any(group.attempt for group in command.groups) else "unmark"
