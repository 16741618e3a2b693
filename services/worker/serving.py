"""What a worker has from the moment that its engine is ready: services, registration, reports."""

import asyncio
import logging
from collections.abc import Callable

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.common.etcd import RETRY_S, Condition, Store
from services.common.grpc_client import Dial
from services.common.grpc_server import Server
from services.common.membership import GROUPS, SERVICES, WORKERS, Directory, Registration
from services.core.groups.fence import MemberState
from services.core.report import EngineReport
from services.worker.config import WorkerConfig
from services.worker.drain import WorkerDrain
from services.worker.engine_client import EngineClient, EngineStopped
from services.worker.engine_participant import EngineParticipant
from services.worker.group_view import GroupView, Place
from services.worker.identity import registration_conditions
from services.worker.ipc import EngineReady, Progress
from services.worker.member.servicer import MemberServicer
from services.worker.reporter import ReportSender
from services.worker.servicer import WorkerServicer
from tideserve.common.v1 import record_pb2
from tideserve.worker.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

SILENCE_MAX_S = 3.0
"""So long the records may be silent while the group is in trouble; a call to etcd takes as long."""


class StrandedGroupWatch:
    """Gives a worker's requests up while etcd is away, so that its group cannot be mended.

    A group that has lost a member goes on after a change of its record. Without it requests would
    stand still here though other groups could run them.
    `stranded`: from when they have been silent for too long until the trouble is over, or another
    epoch has begun. `on_stranded` is called as it begins.
    """

    def __init__(self, store: Store, on_stranded: Callable[[], None]) -> None:
        self._store = store
        self._on_stranded = on_stranded
        self._epoch = 0
        self._in_trouble = asyncio.Event()
        self.stranded = False

    def note(self, report: EngineReport) -> None:
        """The engine has reported."""
        if not report.trouble or report.epoch != self._epoch:
            self._in_trouble.clear()
            self.stranded = False
        self._epoch = report.epoch
        if report.trouble:
            self._in_trouble.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._in_trouble.wait()
            epoch, heard_s = self._epoch, monotonic_s()
            while self._in_trouble.is_set() and epoch == self._epoch:
                if not self.stranded and await self._answers():
                    heard_s = monotonic_s()
                lasts = self._in_trouble.is_set() and epoch == self._epoch
                if lasts and not self.stranded and monotonic_s() - heard_s >= SILENCE_MAX_S:
                    self.stranded = True
                    self._on_stranded()
                await asyncio.sleep(RETRY_S)

    async def _answers(self) -> bool:
        """Whether the group records can be read."""
        try:
            await self._store.snapshot(GROUPS)
        except StoreError:
            return False
        return True


class EngineServing:
    """Serves with an engine that is ready, until it is asked to leave."""

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
        """`record` is the worker's registration, with the address of `server`, which runs."""
        name, incarnation = record.worker_id, record.incarnation
        self._drain_timeout_s = config.drain_timeout_s
        self._store = store
        self._server = server
        self._engine = engine
        self._left_group = False
        self._left_out = False  # the engine's group goes on without it
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
            self._reporter.load_beside,
            self._groups.traceparent_of,
        )
        self._participant = EngineParticipant(
            name,
            engine,
            facts,
            record.address,
            self._reporter.note_change,
            self._requests.give_up_all,
        )
        state = MemberState(name, incarnation)
        self._member = MemberServicer(state, self._participant, lambda: self._groups.groups)
        path, lease_s = f"{WORKERS}{name}", config.lease_ttl_s
        self._registration = Registration(store, path, record, lease_s, self._claim)
        self._drain = WorkerDrain(
            engine, self._groups, self._member, self._requests, self._registration, record
        )
        self._name = name
        self._incarnation = incarnation

    @property
    def place(self) -> Place | None:
        """The configuration that this worker serves; its engine was told of it before."""
        recorded, told = self._groups.place, self._participant.place
        deserted = self._left_out or self._stranded_watch.stranded
        if self._left_group or deserted or recorded is None or told is None:
            return None
        return told if recorded.epoch > told.epoch else recorded

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then leave within the drain time."""
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
            # Also when the engine has died: the others need not wait for the lease to end. etcd may
            # not answer, so the requests go on elsewhere before, and those that come meanwhile.
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
                )
            ]
            registering = tasks.create_task(self._registration.run())
            await stop.wait()
            self._server.drain()
            await self._leave(registering)
            for task in owned:
                task.cancel()

    async def _leave(self, registering: asyncio.Task[None]) -> None:
        deadline_s = monotonic_s() + self._drain_timeout_s
        await self._drain.leave_group(deadline_s)
        self._left_group = True
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)
        await self._registration.withdraw()
        await self._drain.end_requests(deadline_s)

    async def _claim(self) -> tuple[Condition, ...]:
        return await registration_conditions(
            self._store, self._name, self._incarnation, self._member.epoch
        )

    def _deliver(self, progress: Progress) -> None:
        # The load first: a client that asks again at once must not be sent past this worker, which
        # it has left idle; also if it asks another gateway.
        self._reporter.note_dropped(progress.dropped_prefixes)
        self._stranded_watch.note(progress.report)
        self._reporter.note_change()
        self._requests.deliver(progress)
        left_out, self._left_out = self._left_out, progress.report.left
        if self._left_out and not left_out:
            self._requests.give_up_all("the worker's group goes on without it; try again")
        self._drain.note_progress()

    def _note_hung(self) -> None:
        """Requests that are given up go on at another worker, if there is one."""
        log.warning(
            "the engine gave no sign of life for %.0f s: its requests are given up, and it gets no"
            " new ones until it does",
            self._engine.heartbeat_age_s,
        )
        self._requests.give_up_all("the engine of the worker does not answer; try again")
        self._reporter.note_change()

    def _note_stranded(self) -> None:
        """Requests that are given up go on in another group, if there is one."""
        log.warning(
            "the group cannot go on (%s), and etcd does not answer: its requests are given up, and"
            " it gets no new ones until the group goes on",
            self._engine.report.trouble,
        )
        self._requests.give_up_all("the worker's group has lost a member; try again")
        self._reporter.note_change()

    def _note_groups(self) -> None:
        self._member.note_records()
        self._reporter.note_change()

    def _epoch(self) -> int:
        place = self.place
        return place.epoch if place is not None else 0
