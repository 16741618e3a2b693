"""Owns the group state: feeds it events, carries out its commands."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from typing import Any

from services.common.clock import monotonic_s
from services.common.etcd import RETRY_S
from services.common.event_log import EventLog
from services.common.timeouts import timeout
from services.common.tracing import Tracer
from services.core.audit.record import COMMAND, EVENT
from services.core.groups.state import GroupState
from services.core.groups.vocabulary import (
    AbortMember,
    ClusterListed,
    Command,
    Event,
    Group,
    GroupPhase,
    LeadershipChanged,
    MemberAnswered,
    PrepareMembers,
    ReconfigurationCommitted,
    ReconfigurationFailed,
    Reconfigure,
    Targets,
    TimePassed,
    Transact,
    TransactionFinished,
)
from services.core.overload.worker_facts import WorkerFacts
from services.memmgr.change_count import ChangeCount
from services.memmgr.change_trace import ChangeCause, ChangeTrace, restoration
from services.memmgr.cluster_store import Cluster, ClusterStore
from services.memmgr.member_client import MemberClient
from services.memmgr.step import Step, StepPhase
from services.memmgr.worker_memory import MemoryView
from services.memmgr.worker_place import WorkerPlace

TICK_S = 0.2
# How long a change that was asked for waits for writes that are under way.
BUSY_WAIT_S = 5.0
# Longer than any attempt: members' time, and two transactions whose answers are looked up.
ATTEMPT_MARGIN_S = 30.0

log = logging.getLogger(__name__)
Ended = ReconfigurationCommitted | ReconfigurationFailed


class Driver:
    """Keeps group records in step with the registered workers, and changes groups on demand.

    All methods run on the event loop's thread. While etcd is away nothing changes.
    """

    def __init__(
        self,
        state: GroupState,
        store: ClusterStore,
        members: MemberClient,
        memory: MemoryView,
        change_over_timeout_s: float,
        event_log: EventLog | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._state = state
        self._store = store
        self._members = members
        self._memory = memory
        self._change_over_timeout_s = change_over_timeout_s
        self._event_log = event_log
        self._tracer = tracer
        self._traces: dict[str, ChangeTrace] = {}  # by attempt
        self._restoring: list[PrepareMembers] = []  # attempts without a request, if traced
        self._places: dict[str, WorkerPlace] = {}
        # One task per outstanding transaction or call; the state keeps those few.
        self._tasks: asyncio.TaskGroup | None = None
        self._asked: dict[str, asyncio.Future[Ended]] = {}
        # Facts of the registered workers, by id.
        self.facts: dict[str, WorkerFacts] = {}
        self.changes = ChangeCount()
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
        return self._state.token is not None

    def num_layers(self, worker_id: str) -> int:
        """Layers of a registered worker's model; 0 for one that is not registered."""
        worker = self._state.records.workers.get(worker_id)
        return worker.num_layers if worker is not None else 0

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
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._tick())
            async for cluster in self._store.follow():
                self._take(cluster)

    def lead(self, token: int) -> None:
        """This instance decides from now on under `token`, or no longer (0)."""
        self._apply(LeadershipChanged(monotonic_s(), token or None))

    async def reconfigure(self, targets: Targets, cause: ChangeCause) -> AsyncIterator[Step]:
        """Change groups to `targets`; yields how far it is until it is stable or has failed."""
        began_s = monotonic_s()
        trace = ChangeTrace(self._tracer, cause) if self._tracer is not None else None
        names = [stage.worker_id for target in targets for stage in target]
        failure = "it was aborted"
        try:
            async with aclosing(self._reconfigure(targets, names, trace)) as steps:
                async for step in steps:
                    self.changes.note(step.phase, monotonic_s() - began_s)
                    if step.phase in (StepPhase.STABLE, StepPhase.FAILED):
                        failure = step.message if step.phase is StepPhase.FAILED else ""
                    yield step
        finally:
            for attempt in [one for one, kept in self._traces.items() if kept is trace]:
                del self._traces[attempt]
            if trace is not None and trace.epoch and not failure:
                self._start(self._end_when_settled(trace, names))
            elif trace is not None:
                trace.end(failure, self._memory)

    async def _reconfigure(
        self, targets: Targets, names: Sequence[str], trace: ChangeTrace | None
    ) -> AsyncGenerator[Step, None]:
        request_id, ended = await self._ask(targets, trace)
        try:
            if not ended.done():
                yield Step(StepPhase.PREPARING, _getting_ready(targets))
            timeout_s = self._state.config.prepare_timeout_s + ATTEMPT_MARGIN_S
            try:
                async with timeout(timeout_s):
                    result = await ended
            except TimeoutError:
                yield Step(StepPhase.FAILED, "etcd does not answer; `tideserve status` tells later")
                return
        finally:
            del self._asked[request_id]
        if trace is not None:
            trace.ended(result.epoch if isinstance(result, ReconfigurationCommitted) else 0)
        if isinstance(result, ReconfigurationFailed):
            yield Step(StepPhase.FAILED, result.reason)
            return
        text = f"epoch {result.epoch}; {', '.join(names)} change over"
        yield Step(StepPhase.COMMITTED, text, result.epoch)
        yield await self._changed_over(names, result.epoch)

    async def _ask(
        self, targets: Targets, trace: ChangeTrace | None
    ) -> tuple[str, "asyncio.Future[Ended]"]:
        """Begin an attempt, once no other write is in its way."""
        deadline_s = monotonic_s() + BUSY_WAIT_S
        while True:
            request_id = uuid.uuid4().hex
            ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
            self._asked[request_id] = ended
            traceparent = trace.context.traceparent if trace is not None else ""
            self._apply(Reconfigure(monotonic_s(), request_id, targets, traceparent))
            if trace is not None:
                self._traces |= {
                    attempt.attempt_id: trace
                    for attempt in self._state.attempts
                    if attempt.request_id == request_id
                }
            result = ended.result() if ended.done() else None
            busy = isinstance(result, ReconfigurationFailed) and result.busy
            if not busy or monotonic_s() > deadline_s:
                return request_id, ended
            del self._asked[request_id]
            await asyncio.sleep(TICK_S)

    async def _changed_over(self, names: Iterable[str], epoch: int) -> Step:
        """Wait until the members report the epoch, or a later one."""
        deadline_s = monotonic_s() + self._change_over_timeout_s
        while late := [name for name in names if self._memory.epoch_of(name) < epoch]:
            if monotonic_s() > deadline_s:
                text = (
                    f"epoch {epoch} is committed, but {', '.join(late)} did not change over within "
                    f"{self._change_over_timeout_s:g} s; see `tideserve logs`"
                )
                return Step(StepPhase.FAILED, text, epoch)
            await asyncio.sleep(TICK_S)
        return Step(StepPhase.STABLE, f"all members serve epoch {epoch}", epoch)

    async def _end_when_settled(self, trace: ChangeTrace, names: Iterable[str]) -> None:
        """Tell the trace once the change is over for all members, or they take too long."""
        deadline_s = monotonic_s() + self._change_over_timeout_s
        try:
            while monotonic_s() < deadline_s:
                standings = [self._memory.standing_of(name, trace.epoch) for name in names]
                if all(one is not None and one.settled_s is not None for one in standings):
                    break
                await asyncio.sleep(TICK_S)
        finally:
            trace.end(memory=self._memory)

    def _end_restorations(self) -> None:
        """Trace attempts without a request: survivors of a lost member restore their layers."""
        running = {one.attempt_id for one in self._state.attempts}
        for command in [one for one in self._restoring if one.attempt not in running]:
            self._restoring.remove(command)
            trace, wanted = self._traces.pop(command.attempt), command.targets[0]
            stored = self._state.records.groups.get(wanted.group_id)
            if stored is None or stored.group.epoch < wanted.epoch:
                trace.end("it was aborted")
                continue
            trace.ended(wanted.epoch)
            names = [one.worker_id for one in wanted.members]
            self._start(self._end_when_settled(trace, names))

    def _note_preparing(self, command: PrepareMembers) -> None:
        if self._tracer is None:
            return
        trace = self._traces.get(command.attempt)
        if trace is None:
            trace = ChangeTrace(self._tracer, restoration(command))
            self._traces[command.attempt] = trace
            self._restoring.append(command)
        trace.preparing()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._apply(TimePassed(monotonic_s()))
            self._end_restorations()

    def _take(self, cluster: Cluster) -> None:
        listing = cluster.listing
        if cluster.revision >= self._state.records.revision:
            self._places = listing.places
            self.facts = listing.facts
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
        commands = self._state.handle(event)
        # Time that passes without a consequence is of no interest, and passes all the time.
        if self._event_log is not None and (commands or not isinstance(event, TimePassed)):
            self._event_log.append(EVENT, [event])
            self._event_log.append(COMMAND, commands)
        for command in commands:
            self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        # Without a listing nothing is decided, and listings come while `run` runs.
        match command:
            case ReconfigurationCommitted() | ReconfigurationFailed():
                asked = self._asked.get(command.request_id)
                if asked is not None and not asked.done():
                    asked.set_result(command)
            case Transact():
                self._start(self._transact(command))
            case PrepareMembers():
                log.info("attempt %s: members are asked to prepare", command.attempt)
                self._note_preparing(command)
                self._start(self._prepare(command))
            case AbortMember():
                log.info("attempt %s of %s is aborted", command.attempt, command.worker_id)
                self._start(self._members.abort(command, self._places))

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(coroutine)

    async def _transact(self, command: Transact) -> None:
        revision = await self._store.write(command)
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
            if (trace := self._traces.get(command.attempt)) is not None:
                trace.answered(worker_id, reason)
            self._apply(
                MemberAnswered(
                    monotonic_s(), command.attempt, worker_id, incarnation, ready, reason
                )
            )

        await self._members.prepare(command, self._places, answered)


def _getting_ready(targets: Targets) -> str:
    if all(len(target) == 1 for target in targets):
        places = [f"{target[0].worker_id} for all layers" for target in targets]
    else:
        places = [
            f"{stage.worker_id} for layers {stage.first_layer} to {stage.end_layer - 1}"
            for target in targets
            for stage in target
        ]
    return f"{', '.join(places)} get ready, and serve as before meanwhile"
