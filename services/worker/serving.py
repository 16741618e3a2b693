"""Serves requests with a loaded engine: gRPC services, registration, reports and shutdown.

A worker serves alone or in a group with other workers; an epoch numbers the configurations.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.common.etcd import RETRY_S, Store
from services.common.grpc_client import Dial
from services.common.grpc_server import Server
from services.common.membership import GROUPS, SERVICES, WORKERS, Directory, Registration
from services.common.records import to_cost_record
from services.core.groups.fence import MemberState
from services.core.report import EngineReport
from services.worker.config import DrainMode, WorkerConfig
from services.worker.drain import WorkerDrain
from services.worker.engine_client import EngineClient, EngineStopped
from services.worker.engine_participant import EngineParticipant
from services.worker.group_view import GroupView, Place
from services.worker.identity import registration_conditions
from services.worker.ipc import EngineReady, Progress
from services.worker.member.servicer import MemberServicer
from services.worker.reporter import ReportSender
from services.worker.request_returns import RequestReturns
from services.worker.servicer import WorkerServicer
from tideserve.common.v1 import record_pb2
from tideserve.worker.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

COSTS_INTERVAL_S = 30.0
"""Least time between two changes of the cost model in the worker's record."""
COSTS_RETRY_S = 1.0

SILENCE_MAX_S = 3.0
"""Longest silence of etcd for which a group that cannot continue waits; as long as a call takes."""


class StrandedGroupWatch:
    """Detects a stranded group: it has lost a member, and etcd is down, so it cannot be changed.

    A group that has lost a member continues after a change of its record in etcd. While etcd is
    down, its requests would hang although other groups could run them. So `on_stranded` is called
    when etcd has been silent for `SILENCE_MAX_S`. The engine reports such a group as `trouble`.
    """

    def __init__(self, store: Store, on_stranded: Callable[[], None]) -> None:
        self._store = store
        self._on_stranded = on_stranded
        self._epoch = 0  # epoch of the last report
        self._in_trouble = asyncio.Event()  # set while the engine reports trouble at that epoch
        self.stranded = False  # reset when the trouble ends or the epoch changes

    def note(self, report: EngineReport) -> None:
        """Update from a report of the engine."""
        if not report.trouble or report.epoch != self._epoch:
            self._in_trouble.clear()
            self.stranded = False
        self._epoch = report.epoch
        if report.trouble:
            self._in_trouble.set()

    async def run(self) -> None:
        """Poll etcd while the group is in trouble, until cancelled."""
        while True:
            await self._in_trouble.wait()
            epoch, answered_s = self._epoch, monotonic_s()
            while self._in_trouble.is_set() and epoch == self._epoch:
                if not self.stranded and await self._can_read_groups():
                    answered_s = monotonic_s()
                in_trouble = self._in_trouble.is_set() and epoch == self._epoch
                if in_trouble and not self.stranded and monotonic_s() - answered_s >= SILENCE_MAX_S:
                    self.stranded = True
                    self._on_stranded()
                await asyncio.sleep(RETRY_S)

    async def _can_read_groups(self) -> bool:
        """Whether the group records can be read."""
        try:
            await self._store.snapshot(GROUPS)
        except StoreError:
            return False
        return True


class EngineServing:
    """Serves requests with a loaded engine until its shutdown."""

    def __init__(
        self,
        config: WorkerConfig,
        record: record_pb2.WorkerRecord,
        engine: EngineClient,
        facts: EngineReady,
        store: Store,
        server: Server,
        pids: Callable[[], list[int]],
        dial: Dial,
    ) -> None:
        """`record` is the worker's registration with the address of `server`, which is running."""
        name, incarnation = record.worker_id, record.incarnation
        self._config = config
        self._server = server
        self._engine = engine
        self._left_group = False
        self._left_out = False  # whether the engine's group continues without it
        self._stranded_watch = StrandedGroupWatch(store, self._note_stranded)
        self._groups = GroupView(store, name, incarnation, self._note_groups)
        self._services = Directory(store, SERVICES, record_pb2.ServiceRecord)
        self._reporter = ReportSender(
            name, incarnation, facts, self._services, engine, self._epoch, pids, dial
        )
        self._requests = WorkerServicer(
            engine,
            facts,
            lambda: self.place,
            self._reporter.note_received,
            self._reporter.load_for_gateways,
            self._groups.traceparent_of,
        )
        self._participant = EngineParticipant(
            *(name, engine, facts, record.address),
            *(self._reporter.note_change, self._requests.abort_all),
        )
        state = MemberState(name, incarnation)
        self._member = MemberServicer(state, self._participant, lambda: self._groups.groups)
        self._record = record
        claim = partial(registration_conditions, store, state)
        self._registration = Registration(
            store, f"{WORKERS}{name}", record, config.lease_ttl_s, claim
        )
        self._returns = RequestReturns(engine, record, self._services, dial)
        self._drain = WorkerDrain(
            *(engine, self._groups, self._member, self._requests),
            *(self._registration, record, self._returns),
        )

    @property
    def place(self) -> Place | None:
        """The group configuration that this worker serves; None if it serves none."""
        recorded, applied = self._groups.place, self._participant.place
        cut_off = self._left_out or self._stranded_watch.stranded
        if self._left_group or cut_off or recorded is None or applied is None:
            return None
        # The engine has yet to apply a newer record, and etcd has lost writes if it is older.
        return applied

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, then shut down within the drain time."""
        services = self._server.services
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._requests, services)
        worker_pb2_grpc.add_MemberServiceServicer_to_server(self._member, services)
        died = False
        try:
            await self._serve(stop)
        except* EngineStopped:
            died = True
            raise
        finally:
            # Unregister even if the engine has died, so that others need not wait until the lease
            # expires. etcd may be slow, so fail the requests before, and those that arrive
            # meanwhile.
            ended = "the engine of the worker stopped; retry"
            self._requests.fail_all(ended, engine_died=died)
            await self._registration.withdraw()
            self._requests.fail_all(ended, engine_died=died)

    async def _serve(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            owned = [
                tasks.create_task(coroutine)
                for coroutine in (
                    self._engine.run(self._deliver, self._note_hung),
                    self._member.run(),
                    self._groups.run(),
                    self._services.run(),
                    self._stranded_watch.run(),
                    self._reporter.run(),
                    self._requests.run(),
                    self._publish_costs(),
                    self._returns.run_in_outages(),
                )
            ]
            registering = tasks.create_task(self._registration.run())
            await stop.wait()
            self._server.drain()
            await self._leave(registering)
            for task in owned:
                task.cancel()

    async def _publish_costs(self) -> None:
        """Update the worker's record whenever its engine has learned another cost model."""
        while True:
            await self._engine.costs_learned.wait()
            await self._registration.registered.wait()
            # A change of the record would end a change of groups that this worker prepares.
            if self._member.preparing:
                await asyncio.sleep(COSTS_RETRY_S)
                continue
            self._engine.costs_learned.clear()
            costs = to_cost_record(self._engine.cost_model)
            assert costs is not None, "learned, but not sent"
            self._record.cost_model.CopyFrom(costs)
            await self._registration.update(self._record)
            await asyncio.sleep(COSTS_INTERVAL_S)

    async def _leave(self, registering: asyncio.Task[None]) -> None:
        deadline_s = monotonic_s() + self._config.drain_timeout_s
        await self._drain.leave_group(deadline_s)
        self._left_group = True
        if self._config.drain is DrainMode.MOVE:
            self._reporter.note_change()  # the scheduler assigns no requests from now on
            await self._drain.move_requests(deadline_s)
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)
        await self._registration.withdraw()
        await self._drain.end_requests(deadline_s)

    def _deliver(self, progress: Progress) -> None:
        # Report the load before delivering results, so that a client's next request, at any
        # gateway, can use the capacity that its last request has freed.
        self._reporter.note_evicted(progress.dropped_prefixes)
        self._stranded_watch.note(progress.report)
        self._returns.note(progress.report)
        self._reporter.note_change()
        self._requests.deliver(progress)
        left_out, self._left_out = self._left_out, progress.report.left
        if self._left_out and not left_out:
            self._requests.abort_all("the group continues without this worker; retry")
        self._drain.note_progress()

    def _note_hung(self) -> None:
        """Fail all requests, so that they resume on another worker."""
        log.warning(
            "no heartbeat from the engine for %.0f s: its requests are aborted, and it gets no new"
            " requests until it responds",
            self._engine.heartbeat_age_s,
        )
        self._requests.abort_all("the engine of the worker does not respond; retry")
        self._reporter.note_change()

    def _note_stranded(self) -> None:
        """Fail all requests, so that they resume in another group."""
        log.warning(
            "the group is stuck (%s) and etcd does not respond: its requests are aborted, and it"
            " gets no new requests until the group continues",
            self._engine.report.trouble,
        )
        self._requests.abort_all("the worker's group has lost a member; retry")
        self._reporter.note_change()

    def _note_groups(self) -> None:
        self._member.note_records(self._groups.rollbacks)
        self._reporter.note_change()

    def _epoch(self) -> int:
        place = self.place
        return place.epoch if place is not None else 0
