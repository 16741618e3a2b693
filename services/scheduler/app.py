"""Assembles and runs the scheduler process: state machine, gRPC service, registration in etcd."""

import asyncio
import logging
import os
import uuid
from dataclasses import replace

from services.common.advertise import advertised
from services.common.device_profile import load_profile
from services.common.etcd import Store, open_store
from services.common.event_log import open_event_log
from services.common.grpc_server import ProcessServicer, Server
from services.common.membership import SERVICES, Registration
from services.common.metrics_server import metrics_exposed
from services.common.process_metrics import service_registry
from services.common.transport import Transport, transport_of
from services.core.scheduler.dispatch import PREFIX
from services.core.scheduler.state_config import StateConfig
from services.scheduler.config import UNKNOWN_WORKERS, SchedulerConfig
from services.scheduler.demand_reporter import DemandReporter
from services.scheduler.driver import SchedulerDriver
from services.scheduler.leadership import NAME, Leadership
from services.scheduler.metrics import SchedulerCollector
from services.scheduler.servicer import SchedulerServicer
from services.scheduler.serving_groups import ServingGroups
from services.scheduler.shortfall_watch import ShortfallWatch
from tideserve.common.v1 import record_pb2
from tideserve.scheduler.v1 import scheduler_pb2_grpc

STOP_GRACE_S = 1.0
FULL_MODELS_MAX = 16
"""Models whose full queues a gateway stream can hold; a stream with more is closed and repeated."""

log = logging.getLogger(__name__)


async def serve(config: SchedulerConfig, stop: asyncio.Event) -> None:
    """Run the scheduler until `stop` is set."""
    store = open_store(config)
    await store.connect()
    try:
        await _serve(config, store, stop)
    finally:
        await store.close()


async def _serve(config: SchedulerConfig, store: Store, stop: asyncio.Event) -> None:
    settings = state_config(config)
    state = settings.state()
    # A gateway that reconnects repeats its asks for all models, and gets a ticket for each.
    outbox_limit = 2 * FULL_MODELS_MAX * config.state.queue_limit + 1024
    event_log = open_event_log(config.event_log, NAME, settings)
    driver = SchedulerDriver(state, outbox_limit, config.gateway_grace_s, event_log)
    view = ServingGroups(
        store, driver.apply, config.state.rules.scheduling, own_costs=config.cost_profile is None
    )
    transport = transport_of(config)
    server = Server(
        config.host,
        config.port,
        ProcessServicer(NAME, lambda: [os.getpid()], lambda: view.loaded),
        ["tideserve.scheduler.v1.SchedulerService"],
        transport=transport,
    )
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(
        SchedulerServicer(driver), server.services
    )
    leadership = Leadership(store, uuid.uuid4().hex)
    metrics = service_registry(NAME, config, store.calls)
    metrics.register(SchedulerCollector(lambda: driver.snapshot, lambda: leadership.leads))
    async with metrics_exposed(metrics, config.host, config.metrics_port):
        await server.start()
        try:
            await _run(config, store, driver, view, server, leadership, transport, stop)
        finally:
            await server.stop(STOP_GRACE_S)


def state_config(config: SchedulerConfig) -> StateConfig:
    """The settings of the state machine, with the cost model for `prefix` dispatch.

    Raises:
        ConfigError: if the device profile cannot be read.
    """
    if config.state.dispatch != PREFIX:
        return config.state
    return replace(config.state, ttft=load_profile(config.cost_profile or UNKNOWN_WORKERS).model)


async def _run(
    config: SchedulerConfig,
    store: Store,
    driver: SchedulerDriver,
    view: ServingGroups,
    server: Server,
    leadership: Leadership,
    transport: Transport,
    stop: asyncio.Event,
) -> None:
    incarnation, services = leadership.incarnation, leadership.services
    address = await advertised(config, config.host, server.port)
    record = record_pb2.ServiceRecord(
        name=NAME,
        incarnation=incarnation,
        address=address,
        pid=os.getpid(),
        scheduling=config.state.rules.scheduling,
    )
    registration = Registration(
        store, f"{SERVICES}{NAME}/{incarnation}", record, config.lease_ttl_s
    )
    reporter = DemandReporter(services, driver.demands, driver.changed, transport.dial)
    shortfalls = ShortfallWatch(services, driver.apply, transport.dial)
    log.info("scheduler listening on %s, advertised as %s", server.address, address)
    async with asyncio.TaskGroup() as tasks:
        coroutines = (
            *(driver.run(), view.run(), services.run()),
            *(reporter.run(), shortfalls.run()),
        )
        owned = [tasks.create_task(coroutine) for coroutine in coroutines]
        registering = tasks.create_task(registration.run())
        await stop.wait()
        # Drain in this order: become unready, unregister, then end the gateways' streams, so that
        # gateways connect to another instance.
        server.drain()
        registering.cancel()
        await asyncio.wait([registering])
        await registration.withdraw()
        driver.drain()
        for task in owned:
            task.cancel()
