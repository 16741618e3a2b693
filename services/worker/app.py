"""Wires a worker: engine, servicer, registration, reports; drains at the end."""

import asyncio
import logging
import os
import uuid

from prometheus_client import CollectorRegistry

from services.common.address import host_of
from services.common.advertise import advertised
from services.common.clock import monotonic_s
from services.common.etcd import Condition, open_store
from services.common.grpc_server import ProcessServicer, Server
from services.common.membership import GROUPS, SERVICES, WORKERS, Directory, Registration
from services.common.metrics_server import metrics_exposed
from services.common.process_metrics import service_registry
from services.common.protocol import PROTOCOL_VERSION
from services.common.records import capabilities_of, to_shape_record
from services.common.timeouts import timeout
from services.common.transport import transport_of
from services.core.groups.fence import MemberState
from services.worker.build import code_digest
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.engine_participant import EngineParticipant, can_drop
from services.worker.group_view import NOWHERE, Place, place_of, stored_groups, traceparent_of
from services.worker.identity import claim, settled
from services.worker.ipc import EngineReady, Progress
from services.worker.member.servicer import MemberServicer
from services.worker.metrics import WorkerCollector
from services.worker.reporter import Reporter
from services.worker.servicer import WorkerServicer
from tideserve.common.v1 import record_pb2
from tideserve.worker.v1 import worker_pb2_grpc

UNUSED_S = 1.0
"""A member that was unused for so long may leave; longer than an engine's heartbeat."""

log = logging.getLogger(__name__)


class Worker:
    """The servicer process of one worker and all that it owns."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._incarnation = uuid.uuid4().hex
        self._code_digest = code_digest()
        self._store = open_store(config)
        self._groups = Directory(self._store, GROUPS, record_pb2.GroupRecord, self._note_groups)
        self._services = Directory(self._store, SERVICES, record_pb2.ServiceRecord)
        self._engine = EngineClient(config, self._incarnation, self._deliver)
        self._transport = transport_of(config)
        self._server = Server(
            config.host,
            config.port,
            ProcessServicer(config.worker_id, self._pids, self._ready),
            ["tideserve.worker.v1.WorkerService", "tideserve.worker.v1.MemberService"],
            transport=self._transport,
        )
        self._draining = False
        self._progressed = asyncio.Event()
        self._facts: EngineReady | None = None
        self._address = ""
        self._servicer: WorkerServicer | None = None
        self._participant: EngineParticipant | None = None
        self._member: MemberServicer | None = None
        self._reporter: Reporter | None = None

    async def serve(self, stop: asyncio.Event) -> None:
        """Run until `stop`, then let running requests finish within the drain time."""
        config = self._config
        async with metrics_exposed(self._registry(), config.host, config.metrics_port):
            # The port first: a probe sees that the process lives while the model is loaded.
            await self._server.start()
            try:
                await self._store.connect()
                self._address = await advertised(config, config.host, self._server.port)
                facts = await self._start_engine(stop)
                if facts is not None:
                    await self._serve_engine(facts, stop)
            finally:
                await self._server.stop(grace_s=1.0)
                await self._engine.stop()
                await self._store.close()

    def _registry(self) -> CollectorRegistry:
        config = self._config
        registry = service_registry("worker", config, self._store.calls)
        registry.register(
            WorkerCollector(
                config.worker_id,
                config.model_name,
                self._engine,
                lambda: self._facts,
                self._place,
            )
        )
        return registry

    async def _start_engine(self, stop: asyncio.Event) -> EngineReady | None:
        """Load the model; None when `stop` comes first."""
        starting = asyncio.create_task(self._engine.start(host_of(self._address)))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if starting.done():
            return starting.result()
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return None

    async def _serve_engine(self, facts: EngineReady, stop: asyncio.Event) -> None:
        config, self._facts = self._config, facts
        self._reporter = Reporter(
            config.worker_id,
            self._incarnation,
            facts,
            self._services,
            self._engine,
            lambda: self._place().epoch,
            self._pids,
            self._transport.dial,
        )
        self._servicer = WorkerServicer(
            self._engine,
            facts,
            self._place,
            self._reporter.note_received,
            self._reporter.load_beside,
            lambda group_id, epoch: traceparent_of(self._groups.records.values(), group_id, epoch),
        )
        self._participant = EngineParticipant(
            config.worker_id,
            self._engine,
            facts,
            address=lambda: self._address,
            changed=self._note_change,
            end_requests=self._servicer.give_up_all,
        )
        self._member = MemberServicer(
            MemberState(config.worker_id, self._incarnation),
            self._participant,
            lambda: stored_groups(self._groups),
        )
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server.services)
        worker_pb2_grpc.add_MemberServiceServicer_to_server(self._member, self._server.services)
        registration = Registration(
            self._store,
            f"{WORKERS}{config.worker_id}",
            self._record(),
            config.lease_ttl_s,
            self._claim,
        )
        log.info("%s serves %s on %s", config.worker_id, config.model_name, self._address)
        try:
            await self._serve_until(stop, registration)
        finally:
            # Also when the engine has died: the others need not wait for the lease to end.
            await registration.withdraw()
            self._servicer.fail_all("the engine of the worker stopped; retry")

    async def _claim(self) -> tuple[Condition, ...]:
        assert self._member is not None
        return await claim(
            self._store, self._config.worker_id, self._incarnation, self._member.epoch
        )

    async def _serve_until(self, stop: asyncio.Event, registration: Registration) -> None:
        assert self._reporter is not None and self._servicer is not None
        assert self._member is not None
        async with asyncio.TaskGroup() as tasks:
            owned = [
                tasks.create_task(coroutine)
                for coroutine in (
                    self._engine.run(),
                    self._member.run(),
                    self._groups.run(),
                    self._services.run(),
                    self._reporter.run(),
                    self._servicer.run(),
                )
            ]
            registering = tasks.create_task(registration.run())
            await stop.wait()
            self._server.drain()
            deadline_s = monotonic_s() + self._config.drain_timeout_s
            await self._part(registration, deadline_s)
            self._draining = True
            registering.cancel()
            await asyncio.gather(registering, return_exceptions=True)
            await registration.withdraw()
            await self._drain(deadline_s)
            for task in owned:
                task.cancel()

    async def _part(self, registration: Registration, deadline_s: float) -> None:
        """Ask to leave a group of several, and wait until its requests do not need this worker.

        Without a memory manager no split comes; requests that run now may end meanwhile. A change
        that this worker agreed to is waited for as well. Afterwards it agrees to no change.
        """
        assert self._member is not None
        if self._recorded_place().shared or self._is_needed():
            await self._be_taken_out(registration, deadline_s)
        self._member.refuse_all()

    async def _be_taken_out(self, registration: Registration, deadline_s: float) -> None:
        log.info("asks to be taken out of %s", self._recorded_place().group_id)
        asking = asyncio.create_task(registration.update(self._record(draining=True)))
        try:
            async with timeout(deadline_s - monotonic_s()):
                needed_s = monotonic_s()
                # What an engine has not told yet, it does within a heartbeat.
                while self._is_needed() or (
                    self._recorded_place().shared and monotonic_s() - needed_s < UNUSED_S
                ):
                    if self._is_needed():
                        needed_s = monotonic_s()
                    self._progressed.clear()
                    await self._progressed.wait()  # The engine speaks several times a second.
        except TimeoutError:
            log.warning("requests of %s need this worker still", self._recorded_place().group_id)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _is_needed(self) -> bool:
        """Whether requests of other workers would be lost without this one, as far as is known."""
        assert self._servicer is not None and self._member is not None
        if self._member.preparing:
            return True
        told, place = self._engine.report, self._recorded_place()
        if place == NOWHERE:
            return False
        # Until the change is over, other leaders get sequences and KV from here.
        if told.epoch < place.epoch or told.unsettled:
            return True
        used = told.load.kv_blocks_free < told.load.kv_blocks_total
        return place.shared and (used or self._servicer.active > 0)

    async def _drain(self, deadline_s: float) -> None:
        """Wait until no request runs, at most until `deadline_s`."""
        assert self._servicer is not None
        try:
            async with timeout(deadline_s - monotonic_s()):
                await self._servicer.wait_idle()
        except TimeoutError:
            log.warning("%d requests are cut off by the drain time", self._servicer.active)

    def _deliver(self, progress: Progress) -> None:
        assert self._servicer is not None
        # The load first: a client that asks again at once must not be sent past this worker, which
        # it has left idle; also if it asks another gateway.
        self._note_change()
        self._servicer.deliver(progress)
        self._progressed.set()

    def _note_groups(self) -> None:
        if self._member is not None:
            self._member.note_records()
        self._note_change()

    def _note_change(self) -> None:
        if self._reporter is not None:
            self._reporter.note_change()

    def _place(self) -> Place:
        """The configuration that this worker serves; its engine was told of it before."""
        if self._draining or self._participant is None:
            return NOWHERE
        recorded, told = self._recorded_place(), self._participant.place
        return told if recorded.epoch > told.epoch else recorded

    def _recorded_place(self) -> Place:
        """Its place by the group records, whether its engine was told of it or not."""
        return place_of(self._groups.records.values(), self._config.worker_id, self._incarnation)

    def _pids(self) -> list[int]:
        return [os.getpid(), self._engine.pid]

    def _ready(self) -> bool:
        return self._place() != NOWHERE and self._engine.responsive

    def _record(self, draining: bool = False) -> record_pb2.WorkerRecord:
        assert self._facts is not None
        facts = self._facts
        return record_pb2.WorkerRecord(
            worker_id=self._config.worker_id,
            incarnation=self._incarnation,
            address=self._address,
            model=self._config.model_name,
            max_model_len=facts.max_model_len,
            context_tokens=facts.context_tokens,
            block_size=facts.block_size,
            max_batch_tokens=self._config.max_batch_tokens,
            location=self._config.location_parts,
            kv_blocks_total=facts.kv_blocks_total,
            capabilities=capabilities_of(can_drop(facts), self._config.paced),
            shape=to_shape_record(facts.shape),
            arena_bytes=facts.arena_bytes,
            activation_address=facts.activation_address,
            bulk_address=facts.bulk_address,
            draining=draining,
            model_digest=facts.model_digest,
            protocol_version=PROTOCOL_VERSION,
            code_digest=self._code_digest,
        )


async def serve(config: WorkerConfig, stop: asyncio.Event) -> None:
    """Run a worker until `stop` is set."""
    with settled(config) as whole:
        await Worker(whole).serve(stop)
