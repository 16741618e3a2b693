"""Builds and runs the memory manager: group state, memory reports, gRPC service, registration.

Several instances may run; the elected leader changes groups, and the others are standbys.
"""

import asyncio
import logging
import os
import uuid

from services.common.advertise import advertised
from services.common.election import Election, leader_key
from services.common.etcd import SameCreation, Store, open_store
from services.common.event_log import open_event_log
from services.common.grpc_server import ProcessServicer, Server
from services.common.metrics_server import metrics_exposed
from services.common.process_metrics import service_registry
from services.common.tracing import Tracer, tracing
from services.common.transport import transport_of
from services.core.groups.coordinator import CoordinatorConfig, CoordinatorState
from services.core.groups.state import ProtocolConfig
from services.core.overload.events import OverloadConfig
from services.core.overload.monitor import OverloadMonitor
from services.memmgr.action_runner import ActionRunner
from services.memmgr.cluster_store import ClusterStore
from services.memmgr.config import MemmgrConfig
from services.memmgr.demand_view import DemandView
from services.memmgr.driver import Driver, RolledBack
from services.memmgr.introducer import Introducer
from services.memmgr.member_client import MemberClient
from services.memmgr.metrics import MemmgrCollector
from services.memmgr.overload_watch import OverloadWatch
from services.memmgr.presence import NAME, Presence
from services.memmgr.role_writer import RoleWriter
from services.memmgr.servicer import MemmgrServicer
from services.memmgr.shipper import Shipper
from services.memmgr.worker_memory import MemoryView
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2_grpc

STOP_GRACE_S = 1.0  # time for gRPC calls in progress to end at shutdown

log = logging.getLogger(__name__)


async def serve(config: MemmgrConfig, stop: asyncio.Event) -> None:
    """Run the memory manager until `stop` is set."""
    store = open_store(config)
    await store.connect()
    try:
        # Each round remembers nothing of the rounds before.
        while not stop.is_set():
            incarnation = uuid.uuid4().hex
            try:
                async with tracing(config, NAME, incarnation) as tracer:
                    await _serve(config, store, stop, incarnation, tracer)
            except* RolledBack:
                log.error("etcd has lost writes; the memory manager starts again")
    finally:
        await store.close()


async def _serve(
    config: MemmgrConfig, store: Store, stop: asyncio.Event, incarnation: str, tracer: Tracer | None
) -> None:
    transport = transport_of(config)
    updated = asyncio.Event()  # set by new reports of memory or demand; wakes up `OverloadWatch`
    memory, demand = MemoryView(updated), DemandView(updated)
    bounds = _bounds(config)
    protocol = bounds.protocol
    event_log = open_event_log(config.event_log, NAME, bounds)
    driver = Driver(
        CoordinatorState(bounds),
        ClusterStore(store, lambda token: SameCreation(leader_key(NAME), token)),
        MemberClient(transport.dial),
        memory,
        event_log,
        tracer,
    )
    runner = ActionRunner(driver, memory, protocol.backoff_s, protocol.backoff_max_s, event_log)
    watch = OverloadWatch(
        open_monitor(config),
        memory,
        demand,
        lambda: driver.stable_groups,
        lambda: driver.facts,
        runner.act,
        lambda: runner.busy,
        updated,
        event_log,
    )
    server = Server(
        config.host,
        config.port,
        ProcessServicer(NAME, lambda: [os.getpid()], lambda: driver.loaded),
        ["tideserve.memmgr.v1.MemmgrService"],
        transport=transport,
    )
    shipper = Shipper(driver, memory, watch, drained=config.ship_drained)
    servicer = MemmgrServicer(driver, memory, demand, watch, shipper)
    memmgr_pb2_grpc.add_MemmgrServiceServicer_to_server(servicer, server.services)
    metrics = service_registry(NAME, config, store.calls)
    metrics.register(MemmgrCollector(driver, memory, watch))
    async with metrics_exposed(metrics, config.host, config.metrics_port):
        await server.start()
        try:
            parts = runner, watch, shipper, RoleWriter(driver, memory, demand, watch, config.roles)
            await _run(config, store, driver, parts, server, stop, incarnation)
        finally:
            await server.stop(STOP_GRACE_S)
            if event_log is not None:
                event_log.close()


def _bounds(config: MemmgrConfig) -> CoordinatorConfig:
    protocol = ProtocolConfig(
        prepare_timeout_s=config.prepare_timeout_s,
        backoff_s=config.backoff_s,
        share_layers=config.share_layers,
    )
    return CoordinatorConfig(protocol, change_over_timeout_s=config.change_over_timeout_s)


def open_monitor(config: MemmgrConfig) -> OverloadMonitor:
    """The monitor with the configured options."""
    return OverloadMonitor(
        OverloadConfig(
            policy=config.overload_policy,
            rebalance=config.rebalance,
            overload_dwell_s=config.overload_dwell_s,
            split_dwell_s=config.split_dwell_s,
            partial_splits=config.partial_splits,
        )
    )


async def _run(
    config: MemmgrConfig,
    store: Store,
    driver: Driver,
    actions: tuple[ActionRunner, OverloadWatch, Shipper, RoleWriter],
    server: Server,
    stop: asyncio.Event,
    incarnation: str,
) -> None:
    address = await advertised(config, config.host, server.port)
    record = record_pb2.ServiceRecord(
        name=NAME, incarnation=incarnation, address=address, pid=os.getpid()
    )
    presence = Presence(store, record, config.lease_ttl_s)

    def lead(token: int) -> None:
        driver.lead(token)
        presence.set_leader(leads=token != 0)

    election = Election(store, NAME, record, config.lease_ttl_s, lead)
    log.info("memmgr listens on %s, others reach it at %s", server.address, address)
    try:
        async with asyncio.TaskGroup() as tasks:
            introducer = Introducer(driver, lambda: driver.roles)
            parts = (driver, election, presence, introducer, *actions)
            background = [tasks.create_task(part.run()) for part in parts]
            await stop.wait()
            # Refuse new calls, stop all decisions, then resign, so that a standby leads at once.
            server.drain()
            for task in background:
                task.cancel()
    finally:
        await presence.withdraw()
        await election.resign()
