"""Creates the components of the gateway, connects them, and runs them from start to drain."""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from services.common.advertise import advertised
from services.common.etcd import Store, open_store
from services.common.event_log import open_event_log
from services.common.grpc_server import Server
from services.common.membership import SERVICES, Registration
from services.common.metrics_server import metrics_exposed
from services.common.open_files import open_files_max
from services.common.process_metrics import service_registry
from services.common.tracing import Tracer, tracing
from services.common.transport import transport_of
from services.gateway.admin.port import AdminPort
from services.gateway.bounds.body_budget import BodyBudget
from services.gateway.bounds.connections import ClientConnections, limits_of
from services.gateway.bounds.drain import Drain
from services.gateway.bounds.idempotency_cache import IdempotencyCache
from services.gateway.cluster.adapter_directory import AdapterDirectory
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.cluster.cluster_client import ClusterClient
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.cluster.group_client import GroupClient
from services.gateway.cluster.worker_client import WorkerClient
from services.gateway.config import GatewayConfig
from services.gateway.grpc.gateway_service import GatewayService
from services.gateway.grpc.kserve_service import KserveService
from services.gateway.grpc.port import GRACE_S, GrpcPort, public_certificates
from services.gateway.http.app import build
from services.gateway.http.cors import origins_of
from services.gateway.http.server import HttpServer, bind, server_tls
from services.gateway.keys.key_ring import KeyRing
from services.gateway.keys.quota_exchange import QuotaExchange
from services.gateway.keys.quotas import Quotas
from services.gateway.model.served_model import ServedModel
from services.gateway.parts import (
    adapter_loader,
    model_entry,
    open_batches,
    open_cluster_metrics,
    open_models,
    open_readiness,
    service_policy,
)
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import StreamRecord
from services.gateway.records.request_recorder import RequestRecorder
from services.gateway.serving.canceller import Canceller
from services.gateway.serving.model_registry import ModelRegistry
from services.gateway.serving.running import RunningRequests, internal_server
from services.gateway.serving.serving import RequestServing
from services.gateway.structure.checker import GrammarChecker
from services.gateway.text.tokenizer import TextPool
from tideserve.common.v1 import record_pb2

# Maximum entries of the idempotency cache: cached responses and requests that still run.
CACHED_RESPONSES_MAX = 10_000
log = logging.getLogger(__name__)


async def serve(config: GatewayConfig, stop: asyncio.Event) -> None:
    """Run the gateway until `stop`, then drain.

    Raises:
        ServiceError: if the configuration, the model folder, a port or etcd is not usable.
    """
    if (warning := await asyncio.to_thread(lambda: config.exposure)) is not None:
        log.warning("%s", warning)
    stream_record = StreamRecord(open_event_log(config.event_log, "gateway", {}))
    store = open_store(config)
    with contextlib.ExitStack() as sockets:
        # Bind first: a port in use should fail before the model loads.
        listener = sockets.enter_context(bind(config.host, config.port, config.client_stall_s))
        admin = None
        if config.admin_port is not None:
            admin = bind(config.admin_host, config.admin_port, config.client_stall_s)
            sockets.enter_context(admin)
        try:
            models = await asyncio.to_thread(open_models, config)
            await store.connect()
            incarnation = uuid.uuid4().hex
            async with tracing(config, "gateway", incarnation) as tracer:
                gateway = _Gateway(config, models, store, stream_record, incarnation, tracer)
                await gateway.run(listener, admin, stop)
        finally:
            await store.close()


class _Gateway:
    """The components of the gateway and their wiring.

    `incarnation` is a random id of this run of the process; other services see it in etcd.
    """

    def __init__(
        self,
        config: GatewayConfig,
        models: Sequence[ServedModel],
        store: Store,
        stream_record: StreamRecord,
        incarnation: str,
        tracer: Tracer | None,
    ) -> None:
        self._incarnation, self._config, self._store = incarnation, config, store
        self._transport = transport_of(config)
        self._pool = TextPool(config.tokenizer_threads)
        self._names = [model.name for model in models]
        self._renderers = [model.renderer for model in models if model.renderer is not None]
        self._checkers = [
            GrammarChecker(model.vocab_size, model.tokenizer.added_tokens) for model in models
        ]
        self._drain = Drain(config.inflight_max, config.batch_inflight_max)
        self._bodies = BodyBudget(config.body_bytes_max)
        self._running = RunningRequests()
        self._view = ClusterView(store, self._members_changed)
        self._adapters = AdapterDirectory(store)
        self._admission = self._make_admission()
        self._metrics = self._make_metrics()
        self._connections = self._make_connections()
        self._keys = KeyRing(
            config.api_key,
            config.admin_key,
            config.api_keys_file,
            on_change=lambda ring: self._metrics.quotas.set_limits(ring.limits_by_owner()),
        )
        quotas = Quotas(self._metrics.quotas)
        self._exchange = QuotaExchange(store, incarnation, quotas.state, config.lease_ttl_s)
        self._workers = self._make_workers()
        self._probe = open_readiness(config, self._view, self._admission, self._drain)
        serving = self._request_serving(models, stream_record)
        canceller = Canceller(self._running, self._view, self._transport.dial, incarnation)
        recorder = RequestRecorder(self._metrics, tracer, incarnation, quotas)
        self._tls = server_tls(config.http_tls_cert_file, config.http_tls_key_file)
        self._batches = open_batches(
            *(config, serving, self._pool, self._keys, quotas),
            *(self._metrics.registry, store, incarnation, stream_record),
        )
        self._http = self._http_server(serving, canceller, recorder)
        self._grpc = self._grpc_port(serving, canceller, recorder)
        self._connect_gauges()

    async def run(
        self, listener: socket.socket, admin: socket.socket | None, stop: asyncio.Event
    ) -> None:
        """Serve clients on `listener`, and operators on `admin`, until `stop`; then drain."""
        config = self._config
        server = internal_server(
            config.grpc_host,
            config.grpc_port,
            self._probe.ready,
            self._transport,
            self._running,
        )
        # Start the servers before the registration publishes this gateway's address.
        await server.start()
        if self._grpc is not None:
            await self._grpc.start()
        address = await advertised(config, config.grpc_host, server.port)
        registration = self._registration(address)
        try:
            async with (
                metrics_exposed(self._metrics.registry, config.grpc_host, config.metrics_port),
                asyncio.TaskGroup() as tasks,
            ):
                background = [tasks.create_task(run()) for run in self._parts(registration)]
                # Else the names of adapters would be unknown for a moment.
                await self._adapters.loaded()
                http = tasks.create_task(self._http.serve([listener]))
                log.info("listening on %s:%d", *listener.getsockname()[:2])
                admin_port = None
                if admin is not None:
                    admin_port = self._admin_port()
                    tasks.create_task(admin_port.run(admin))
                await stop.wait()
                await self._leave(server, admin_port)
                self._http.stop()
                await http
                for task in background:
                    task.cancel()
        finally:
            if self._batches is not None:
                await self._batches.close()
            self._pool.close()
            await asyncio.gather(*(checker.close() for checker in self._checkers))
            await self._exchange.withdraw()
            await registration.withdraw()
            if self._grpc is not None:
                await self._grpc.stop()
            await server.stop(grace_s=0.5)

    def _parts(self, registration: Registration) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """What runs in the background until it is cancelled."""
        parts = [
            self._view.run,
            self._adapters.run,
            self._admission.run,
            self._workers.run,
            self._keys.run,
        ]
        parts += [registration.run, self._probe.run]
        parts += [checker.run for checker in self._checkers]
        parts += [renderer.run for renderer in self._renderers]
        if self._keys.has_file:
            parts.append(self._exchange.run)
        if self._batches is not None:
            parts.append(self._batches.run)
        return parts

    async def _leave(self, server: Server, admin_port: AdminPort | None) -> None:
        """Stop accepting requests; wait for the running requests until the drain deadline."""
        # First fail all health checks, so that load balancers stop routing here.
        server.drain()
        if self._grpc is not None:
            self._grpc.leave()
        if self._batches is not None:
            self._batches.stop_claiming()
        await self._drain.leave(self._config.drain_delay_s)
        log.info("draining %d requests", self._drain.inflight)
        # gRPC calls get extra time to send the errors of requests that the drain cancels.
        if self._grpc is not None:
            self._grpc.refuse(self._config.drain_timeout_s + GRACE_S)
        await self._drain.drain(self._config.drain_timeout_s)
        # Close the admin port last: operators can watch the drain.
        if admin_port is not None:
            admin_port.close()

    def _request_serving(
        self, models: Sequence[ServedModel], stream_record: StreamRecord
    ) -> RequestServing:
        config, policy = self._config, service_policy(self._config)
        idempotency_cache = IdempotencyCache[Any](
            config.idempotency_keep_s,
            config.idempotency_grace_s,
            CACHED_RESPONSES_MAX,
            config.idempotency_bytes_max,
        )
        self._metrics.answer_bytes.set_function(lambda: idempotency_cache.bytes_held)
        return RequestServing(
            models=ModelRegistry(
                [
                    model_entry(
                        *(config, model, checker, self._pool, policy),
                        *(self._view.of(model.name), self._admission, self._workers),
                        *(self._metrics, stream_record),
                    )
                    for model, checker in zip(models, self._checkers, strict=True)
                ],
                self._adapters,
            ),
            policy=policy,
            drain=self._drain,
            bodies=self._bodies,
            running=self._running,
            idempotency_cache=idempotency_cache,
            metrics=self._metrics,
            request_timeout_s=config.request_timeout_s,
            batch_timeout_s=config.batch_timeout_s,
            client_stall_s=config.client_stall_s,
            refuse_unknown=config.unknown_fields == "refuse",
        )

    def _http_server(
        self,
        serving: RequestServing,
        canceller: Canceller,
        recorder: RequestRecorder,
    ) -> HttpServer:
        app = build(
            serving,
            canceller,
            self._pool,
            self._probe,
            self._keys,
            recorder,
            self._config.public_metrics,
            origins_of(self._config.cors_origins),
            self._batches,
            open_cluster_metrics(
                self._config, self._view, self._admission, self._transport.dial, self._store
            ),
            self._config.overloaded_status,
        )
        return HttpServer(app, self._tls, self._config.keep_alive_s, self._connections, "http")

    def _grpc_port(
        self,
        serving: RequestServing,
        canceller: Canceller,
        recorder: RequestRecorder,
    ) -> GrpcPort | None:
        config = self._config
        if config.public_grpc_port is None:
            return None
        return GrpcPort(
            (
                GatewayService(serving, canceller, self._pool),
                KserveService(serving, self._pool, self._probe, recorder),
            ),
            serving,
            self._probe,
            self._keys,
            recorder,
            self._connections,
            host=config.public_grpc_host,
            port=config.public_grpc_port,
            tls=public_certificates(
                config.public_grpc_ca_file,
                config.http_tls_cert_file,
                config.http_tls_key_file,
            ),
            reflection=config.public_grpc_reflection,
        )

    def _admin_port(self) -> AdminPort:
        dial = self._transport.dial
        cluster, groups = (
            ClusterClient(self._view, dial, self._store),
            GroupClient(self._view, dial),
        )
        return AdminPort(
            self._keys,
            cluster,
            groups,
            self._probe,
            self._metrics,
            adapter_loader(self._config, self._adapters, self._view),
            self._tls,
            self._batches,
            models=self._names,
            host=self._config.admin_host,
            names=self._config.admin_names,
            keep_alive_s=self._config.keep_alive_s,
        )

    def _registration(self, address: str) -> Registration:
        incarnation = self._incarnation
        record = record_pb2.ServiceRecord(
            name="gateway", incarnation=incarnation, address=address, pid=os.getpid()
        )
        key = f"{SERVICES}gateway/{incarnation}"
        return Registration(self._store, key, record, self._config.lease_ttl_s)

    def _make_admission(self) -> AdmissionClient:
        config, view = self._config, self._view
        return AdmissionClient(
            lambda: view.address_of("scheduler"),
            config.admit_timeout_s,
            self._transport.dial,
        )

    def _make_workers(self) -> WorkerClient:
        return WorkerClient(
            self._view.worker_addresses,
            self._config.attach_timeout_s,
            self._metrics.count_moved_stream,
            self._admission.forward_load,
            self._transport.dial,
            self._view.loads_adapters,
        )

    def _make_metrics(self) -> Metrics:
        registry = service_registry("gateway", self._config, self._store.calls)
        metrics = Metrics(self._names, registry)
        metrics.inflight.set_function(lambda: self._drain.inflight)
        metrics.admitting.set_function(lambda: self._admission.waiting)
        metrics.running.set_function(lambda: self._workers.running)
        metrics.body_bytes.set_function(lambda: self._bodies.bytes_held)
        return metrics

    def _make_connections(self) -> ClientConnections:
        limits = limits_of(open_files_max(), self._config.connections_per_address_max)
        log.info(
            "connections of clients: at most %d descriptors, %d per address",
            *(limits.all_max, limits.address_max),
        )
        return ClientConnections(limits, self._metrics.count_closed_connection)

    def _connect_gauges(self) -> None:
        """Connect gauges with the components that are created after the metrics."""
        self._metrics.keys_refused.set_function(lambda: self._keys.failing)
        self._metrics.keys_digest.set_function(lambda: self._keys.digest)
        self._metrics.quota_sharing.set_function(lambda: self._exchange.sharing)
        self._metrics.ready.set_function(self._probe.ready)
        self._metrics.export_connections(self._connections.count)
        for name in self._names:
            self._metrics.export_readiness(
                name,
                partial(self._probe.model_ready, name),
                partial(self._probe.groups_serving, name),
            )

    def _members_changed(self) -> None:
        self._admission.notify_scheduler_change()
        self._workers.notify_workers_change()
