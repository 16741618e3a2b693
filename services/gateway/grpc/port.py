"""Runs the public gRPC port: server, methods, reflection and shutdown."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from services.common.address import join_address, listen
from services.common.errors import ConfigError
from services.common.grpc_client import MESSAGE_BYTES_MAX as RESPONSE_BYTES_MAX
from services.common.health import HealthServicer
from services.common.tls import CertificateFiles, ServerTls
from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.bounds.connections import ClientConnections
from services.gateway.bounds.listener import BACKLOG
from services.gateway.cluster.readiness import GatewayReadiness
from services.gateway.grpc.call import Call, decoded
from services.gateway.grpc.health import SERVICE as HEALTH
from services.gateway.grpc.health import health_methods
from services.gateway.grpc.interceptors import Method, RequestInterceptor
from services.gateway.grpc.relay import Relay
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.request_recorder import RequestRecorder
from services.gateway.serving.serving import RequestServing
from services.gateway.vocabulary.errors import BodyTimeout

log = logging.getLogger(__name__)

METADATA_BYTES_MAX = 16 * 2**10
CONNECTION_AGE_S = 600
STREAMS_MAX = 1024
"""Concurrent calls of a connection; further calls wait at the client."""


def server_options(longest_call_s: float) -> tuple[tuple[str, int], ...]:
    """The channel options of the server.

    Connections close after `CONNECTION_AGE_S`, once their running calls end, so that load balancing
    by connection recovers after a change.
    """
    return (
        ("grpc.max_receive_message_length", BODY_BYTES_MAX),
        ("grpc.max_send_message_length", RESPONSE_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        # No bandwidth probe: it would grant megabytes of window on streams that no handler reads.
        # 512 streams held 1.5 GB with it and 45 MB without it.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", int(longest_call_s * 1000)),
        # Detect dead clients, and disconnect clients that ping more often than every 5 s.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    )


class PublicServer:
    """Serves clients over gRPC at `host`:`port`, through a relay; port 0: any free port."""

    def __init__(
        self,
        host: str,
        port: int,
        relay: Relay,
        interceptor: RequestInterceptor,
        longest_call_s: float,
        stall_s: float,
    ) -> None:
        """`stall_s`: the kernel resets connections that accept no data for so long."""
        self._host, self._port, self._stall_s = host, port, stall_s
        self._relay = relay
        self._grpc = grpc.aio.server(
            interceptors=(interceptor,), options=server_options(longest_call_s)
        )

    async def start(self) -> str:
        """Bind and serve; return the address (host:port).

        Raises:
            ConfigError: if the port cannot be bound.
        """
        listening = listen(self._host, self._port, BACKLOG, self._stall_s)
        listening.setblocking(False)
        # An abstract socket needs no folder, and leaves nothing when the process is killed. Calls
        # of other processes lack a token of the relay.
        name = f"tideserve-{secrets.token_hex(16)}"
        self._grpc.add_insecure_port(f"unix-abstract:{name}")
        await self._grpc.start()
        self._relay.start(listening, name)
        return join_address(self._host, listening.getsockname()[1])

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, and cancel the running calls after `grace_s`."""
        self._relay.refuse()
        await self._grpc.stop(grace_s)
        await self._relay.close()


IDLE_S = 30.0


def reflection_methods(services: Iterable[str]) -> dict[str, Method]:
    """The methods of grpc.reflection.v1alpha.ServerReflection for these services and itself."""
    servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))

    async def reflect(call: Call) -> None:
        # End the call of an idle client without an error.
        with call.limits.stream(call.limit_key), contextlib.suppress(BodyTimeout):
            while (data := await call.read(IDLE_S)) is not None:
                request = decoded(reflection_pb2.ServerReflectionRequest, data)
                for response in servicer.ServerReflectionInfo(iter((request,)), None):
                    await call.client.send(response)

    return {f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Method(reflect)}


# Time for calls that the drain cancels to send their errors.
GRACE_S = 2.0


class MethodProvider(Protocol):
    """A gRPC service."""

    def methods(self) -> dict[str, Method]:
        """The service's methods by full name."""


class GrpcPort:
    """Serves clients over gRPC until it is drained."""

    def __init__(
        self,
        providers: Sequence[MethodProvider],
        serving: RequestServing,
        probe: GatewayReadiness,
        keys: KeyRing,
        recorder: RequestRecorder,
        connections: ClientConnections,
        *,
        host: str,
        port: int,
        tls: ServerTls | None,
        reflection: bool,
    ) -> None:
        """`providers`: the services. `reflection`: whether to serve server reflection.

        `tls`: the server's certificate, and a CA if clients need certificates; None: no TLS.
        """
        methods = {
            path: method for provider in providers for path, method in provider.methods().items()
        }
        services = sorted({path.split("/")[1] for path in methods})
        if reflection:
            methods |= reflection_methods((*services, HEALTH))
        self._health = HealthServicer(services, probe.ready)
        methods |= health_methods(self._health)
        relay = Relay(connections, tls)
        stall_s = serving.client_stall_s
        interceptor = RequestInterceptor(
            methods, relay.connection, keys, recorder, serving.metrics, stall_s
        )
        self._server = PublicServer(host, port, relay, interceptor, serving.longest_s, stall_s)
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port cannot be bound."""
        log.info("listening for gRPC on %s", await self._server.start())

    def leave(self) -> None:
        """Fail the health checks; calls are still accepted."""
        self._health.drain()

    def refuse(self, grace_s: float) -> None:
        """Refuse new calls; running calls may continue for `grace_s`."""
        self._health.close()
        self._stopping = asyncio.create_task(self._server.stop(grace_s))

    async def stop(self) -> None:
        """Wait until all calls have ended."""
        if self._stopping is None:
            self.refuse(GRACE_S)
        assert self._stopping is not None
        await self._stopping


def public_certificates(ca: Path | None, cert: Path | None, key: Path | None) -> ServerTls | None:
    """TLS of the port: HTTPS's certificate and a CA for client certificates; None: no TLS.

    Raises:
        ConfigError: if the files are invalid.
    """
    if cert is None or key is None:
        if ca is not None:
            raise ConfigError(
                "'public_grpc_ca_file' needs 'http_tls_cert_file' and 'http_tls_key_file'; set all"
                " three or omit it"
            )
        return None
    return ServerTls(CertificateFiles("http_tls", ca=ca, cert=cert, key=key), "h2")
