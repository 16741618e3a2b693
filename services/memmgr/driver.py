"""The driver of the coordinator's state machine: passes events to it, and executes its commands.

`CoordinatorState` decides on changes of groups; this module connects it with etcd and the workers.
An *attempt* is a two-phase change: Prepare at every member, then a commit in etcd.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common import failpoint
from services.common.clock import monotonic_s, unix_s
from services.common.etcd import RETRY_S
from services.common.event_log import EventLog
from services.common.tracing import Tracer
from services.core.audit.record import COMMAND, EVENT
from services.core.groups.coordinator import (
    ENDED,
    ChangeCalledOff,
    ChangePhase,
    ChangeRequested,
    ChangeStepped,
    Command,
    CoordinatorState,
    Event,
    MembersPolled,
    MemberStatus,
    PollMembers,
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
from services.core.overload.role_peers import WorkerPeers
from services.core.overload.shipping_pair import ShippingPair
from services.core.overload.worker_facts import WorkerFacts
from services.core.report import MemoryReport
from services.core.role import Role
from services.memmgr.change_count import LAST_PHASES, ChangeCount
from services.memmgr.change_trace import ChangeCause, ChangeTrace, restore_cause
from services.memmgr.cluster_store import ClusterRecords, ClusterStore
from services.memmgr.losses import Losses, LossLog
from services.memmgr.member_client import MemberClient, ShippingFailed
from services.memmgr.translate_record import WorkerEndpoint
from services.memmgr.worker_memory import MemoryView
from tideserve.worker.v1 import worker_pb2

TICK_S = 0.2  # interval of `TimePassed` events

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _WaitedChange:
    """A change whose requester waits in `reconfigure`."""

    began_s: float  # time of the request
    steps: asyncio.Queue[ChangeStepped] = field(default_factory=asyncio.Queue)


class RolledBack(Exception):
    """etcd has lost writes, so what this process remembers of the records is wrong."""


class Driver:
    """Reconciles group records with the registered workers, and changes groups on request.

    All methods run on the event loop's thread. While etcd is down, no group changes.
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
        self._traces: dict[str, ChangeTrace] = {}  # by change id
        self._endpoints: dict[str, WorkerEndpoint] = {}  # of the registered workers, by id
        # A task per transaction, call or poll in flight; the state machine bounds their number.
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._waited: dict[str, _WaitedChange] = {}  # by change id
        self._loss_log = LossLog()
        # Facts for the planning of merges about the registered workers, by id.
        self.facts: dict[str, WorkerFacts] = {}
        self.roles: dict[str, Role] = {}  # as recorded, by worker id
        self.changes = ChangeCount()
        self.losses = Losses()
        self._rollbacks: int | None = None  # of etcd, before the first listing
        self.loaded = False  # whether the records have been read

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups that are not dissolved, ordered by id."""
        stored = self._state.records.groups.values()
        live = [entry.group for entry in stored if entry.group.phase is not GroupPhase.DISSOLVED]
        return tuple(sorted(live, key=lambda group: group.group_id))

    @property
    def stable_groups(self) -> tuple[Group, ...]:
        """The serving groups, ordered by id."""
        return tuple(group for group in self.groups if group.phase is GroupPhase.STABLE)

    @property
    def leads(self) -> bool:
        """Whether this instance is the leader."""
        return self._state.leads

    def groups_of(self, targets: Targets) -> tuple[Group, ...]:
        """The current groups of the workers in `targets`, ordered by id."""
        names = {stage.worker_id for target in targets for stage in target}
        return tuple(
            group
            for group in self.groups
            if any(member.worker_id in names for member in group.members)
        )

    async def run(self) -> None:
        """Follow the records in etcd and pass them to the state machine, until cancelled.

        Raises:
            RolledBack: in a group, if etcd has lost writes since the first listing.
        """
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
        """Set this instance's leadership: its fencing token, or 0 for a standby."""
        self._apply(LeadershipChanged(monotonic_s(), token or None))

    def note_report(self, report: MemoryReport) -> None:
        """Process a worker's report: memory usage, a stuck group (`trouble`), a hung engine."""
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
        """Report a change of `engine_hung` to the state machine.

        `before`: the worker's previous report, or None for the first since its registration.
        """
        name, hung = report.worker_id, report.engine_hung
        same_process = before is not None and before.incarnation == report.incarnation
        was_hung = before is not None and before.engine_hung
        if same_process and hung == was_hung:
            return
        if hung != was_hung:
            log.warning("the engine of %s %s", name, "hangs" if hung else "responds again")
        self._apply(EngineHung(monotonic_s(), name, report.incarnation, hung))

    async def reconfigure(
        self, targets: Targets, cause: ChangeCause, urgent: bool = False
    ) -> AsyncIterator[ChangeStepped]:
        """Request a change of groups to `targets`; yields each step until STABLE or FAILED.

        The state machine ends every change by a deadline. An `urgent` change skips the queue.
        """
        change_id, waited = uuid.uuid4().hex, _WaitedChange(monotonic_s())
        self._waited[change_id] = waited
        traceparent = ""
        if self._tracer is not None:
            trace = self._traces[change_id] = ChangeTrace(self._tracer, cause)
            traceparent = trace.context.traceparent
        self._apply(ChangeRequested(monotonic_s(), change_id, targets, urgent, traceparent))
        while True:
            step = await waited.steps.get()
            yield step
            if step.phase in LAST_PHASES:
                return

    def call_off(self, targets: Targets, reason: str) -> None:
        """Cancel the change to `targets` unless its commit is in flight or done."""
        self._apply(ChangeCalledOff(monotonic_s(), targets, reason))

    async def ship(
        self,
        pair: ShippingPair,
        requests_max: int = 0,
        *,
        if_cheaper: bool = False,
        blocks_max: int = 0,
    ) -> worker_pb2.ShipRequestsResponse:
        """Move running requests from a worker to another; only the leader may.

        `if_cheaper`: only requests whose KV is sent in less time than it is computed. `blocks_max`:
        their KV blocks in total; 0: no limit.

        Raises:
            ShippingFailed: if the source refuses, or does not answer, or another process leads.
        """
        token = self._state.token
        if token is None:  # since the caller chose the pair
            raise ShippingFailed("another memory manager leads by now; it moves requests")
        return await self._members.ship(
            *(pair, token, self._endpoints, requests_max, if_cheaper, blocks_max)
        )

    async def write_roles(self, roles: Mapping[str, Role]) -> bool:
        """Record the roles of workers; False if this instance does not lead.

        Raises:
            StoreError: without an answer; the records may have been written.
        """
        token = self._state.token
        return token is not None and await self._store.write_roles(token, roles, unix_s())

    async def introduce(self, workers: Iterable[WorkerPeers]) -> None:
        """Connect workers to their peers, if this instance leads."""
        token = self._state.token
        if token is not None:
            await self._members.introduce(workers, token, self._endpoints)

    def _group_of(self, worker_id: str) -> str:
        """The group id in the worker's assignment; the worker's id if it has no assignment."""
        stored = self._state.records.assignments.get(worker_id)
        return stored.assignment.group_id if stored is not None else worker_id

    def _note_step(self, step: ChangeStepped) -> None:
        waited = self._waited.get(step.change_id)
        if waited is None and step.phase is ChangePhase.FAILED:
            self._loss_log.note_failed(step.change_id, step.message)
        if waited is not None:
            waited.steps.put_nowait(step)
            if step.phase in LAST_PHASES:
                del self._waited[step.change_id]
                self.changes.note(step.phase, monotonic_s() - waited.began_s)
        trace = self._traces.get(step.change_id)
        if trace is not None and step.phase is ChangePhase.COMMITTED and step.epoch is not None:
            trace.committed(step.epoch)
        if trace is not None and step.phase in ENDED:
            del self._traces[step.change_id]
            failed = step.phase is ChangePhase.FAILED
            trace.end(step.message if failed else "", self._memory)

    def _poll_members(self, command: PollMembers) -> None:
        members = []
        for worker_id in command.worker_ids:
            latest = self._memory.latest(worker_id)
            if latest is not None:
                settled = latest.settled_s is not None
                members.append(MemberStatus(worker_id, latest.epoch, settled))
        self._apply(MembersPolled(monotonic_s(), command.change_id, tuple(members)))

    async def _poll_members_later(self, command: PollMembers) -> None:
        await asyncio.sleep(command.after_s)
        self._poll_members(command)

    def _trace_of(self, attempt: str) -> ChangeTrace | None:
        change_id = self._state.change_of(attempt)
        return self._traces.get(change_id) if change_id is not None else None

    def _note_preparing(self, command: PrepareMembers) -> None:
        if self._tracer is None:
            return
        trace = self._trace_of(command.attempt)
        if trace is None:  # an attempt without a request, such as a restore by survivors
            trace = self._traces[command.attempt] = ChangeTrace(
                self._tracer, restore_cause(command)
            )
        trace.preparing()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._apply(TimePassed(monotonic_s()))

    def _take(self, cluster: ClusterRecords) -> None:
        if self._rollbacks is None:
            self._rollbacks = cluster.rollbacks
        elif self._rollbacks != cluster.rollbacks:
            raise RolledBack
        listing = cluster.listing
        # A listing may be older than commits of this instance: then keep the newer state.
        if cluster.revision >= self._state.records.revision:
            self._endpoints = listing.endpoints
            self.facts = listing.facts
            self.roles = listing.roles
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
        # Do not log ticks without commands, which would fill the log.
        if self._event_log is not None and (commands or not isinstance(event, TimePassed)):
            self._event_log.append(EVENT, [event])
            self._event_log.append(COMMAND, commands)
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        # The state machine emits no such command before its first listing, which `run` delivers, so
        # the task group exists.
        match command:
            case Transact():
                self.losses.note_transaction(self._state.records, command, int(time.time()))
                self._start(self._transact(command))
            case PrepareMembers():
                log.info("attempt %s: sending Prepare to the members", command.attempt)
                self._loss_log.note_attempt(command)
                self._note_preparing(command)
                failpoint.hit("memmgr.prepare.sent")
                self._start(self._prepare(command))
            case AbortMember():
                log.info("attempt %s: sending Abort to %s", command.attempt, command.worker_id)
                self._start(self._members.abort(command, self._endpoints))
            case PollMembers() if command.after_s:
                self._start(self._poll_members_later(command))
            case PollMembers():
                self._poll_members(command)
            case ChangeStepped():
                self._note_step(command)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        if self._stopping:
            coroutine.close()  # the next leader removes the marks of this attempt
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
                "committed" if revision is not None else "not committed, reading the records again",
            )
        if command.removed_workers:
            names = ", ".join(command.removed_workers)
            done = "done" if revision is not None else "not committed"
            log.info("removal of the records of departed workers %s: %s", names, done)
        finished = TransactionFinished(monotonic_s(), command.transaction_id, revision)
        self._apply(finished)
        if revision is None:
            # The etcd watch delivers nothing if no record has changed, so request a listing.
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

        await self._members.prepare(command, self._endpoints, answered)


def _kind_of(command: Transact) -> str:
    """The purpose of a transaction, as it appears in the names of failpoints."""
    if any(group.phase is GroupPhase.DEGRADED for group in command.groups):
        return "settle"
    if command.assignments:
        return "commit"
    return "mark" if any(group.attempt for group in command.groups) else "unmark"
