"""The public gRPC port: its parts, and their life beside the other ports."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import grpc.aio
from grpc_reflection.v1alpha import reflection, reflection_pb2

from services.common.address import join_address
from services.common.errors import ConfigError
from services.common.grpc_client import MESSAGE_BYTES_MAX as ANSWER_BYTES_MAX
from services.common.health import HealthServicer
from services.common.tls import CertificateFiles, CertificateSource
from services.common.transport import server_credentials
from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.cluster.readiness import ReadinessProbe
from services.gateway.grpc.call import Call, decoded
from services.gateway.grpc.health import SERVICE as HEALTH
from services.gateway.grpc.health import health_methods
from services.gateway.grpc.interceptors import Method, RequestInterceptor
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.reception import Reception
from services.gateway.serving.serving import RequestServing
from services.gateway.vocabulary.errors import BodyTimeout

log = logging.getLogger(__name__)

METADATA_BYTES_MAX = 16 * 2**10
CONNECTION_AGE_S = 600
STREAMS_MAX = 1024
"""Calls of one connection at a time; more wait at the client."""


def server_options(longest_call_s: float) -> tuple[tuple[str, int], ...]:
    """How the server treats connections of all clients.

    Connections are asked to go after `CONNECTION_AGE_S`, so that balancing by connections heals;
    running calls may end first.
    """
    return (
        ("grpc.max_receive_message_length", BODY_BYTES_MAX),
        ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
        ("grpc.max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),
        ("grpc.max_concurrent_streams", STREAMS_MAX),
        # Else a fast client is let send megabytes on each stream that nobody reads yet: with 512 of
        # them the gateway held 1.5 GB, without 45 MB. A message that is read may come at once.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_connection_age_ms", CONNECTION_AGE_S * 1000),
        ("grpc.max_connection_age_grace_ms", int(longest_call_s * 1000)),
        # A frozen client is noticed; one that pings more often than that is sent away.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.so_reuseport", 0),
    )


class PublicServer:
    """Serves clients over gRPC at `host`:`port` (0: any free one)."""

    def __init__(
        self,
        host: str,
        port: int,
        door: RequestInterceptor,
        longest_call_s: float,
        tls: CertificateSource | None = None,
    ) -> None:
        """`tls`: the certificate, and the CA of clients' certificates if they must have one; None:
        in clear.
        """
        self._host, self._port, self._tls = host, port, tls
        self._grpc = grpc.aio.server(interceptors=(door,), options=server_options(longest_call_s))

    async def start(self) -> str:
        """Bind and serve; the address (host:port).

        Raises:
            ConfigError: if the port cannot be bound.
        """
        wanted = join_address(self._host, self._port)
        try:
            if self._tls is None:
                port = self._grpc.add_insecure_port(wanted)
            else:
                port = self._grpc.add_secure_port(wanted, server_credentials(self._tls))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {wanted}; it may be in use: choose another port"
            ) from error
        await self._grpc.start()
        return join_address(self._host, port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, and end those that run within `grace_s`."""
        await self._grpc.stop(grace_s)


IDLE_S = 30.0


def reflection_methods(services: Iterable[str]) -> dict[str, Method]:
    """The methods of grpc.reflection.v1alpha.ServerReflection about these services and itself."""
    servicer = reflection.ReflectionServicer((*services, reflection.SERVICE_NAME))

    async def reflect(call: Call) -> None:
        # A caller that asks nothing for a while is done.
        with call.limits.stream(call.guest), contextlib.suppress(BodyTimeout):
            while (data := await call.read(IDLE_S)) is not None:
                request = decoded(reflection_pb2.ServerReflectionRequest, data)
                for answer in servicer.ServerReflectionInfo(iter((request,)), None):
                    await call.client.send(answer)

    return {f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Method(reflect)}


# Calls that end with the gateway's drain have that long to tell their clients.
GRACE_S = 2.0


class MethodProvider(Protocol):
    """A service."""

    def methods(self) -> dict[str, Method]:
        """Its methods by full name."""


class GrpcPort:
    """Serves clients over gRPC until it is drained."""

    def __init__(
        self,
        parts: Sequence[MethodProvider],
        serving: RequestServing,
        probe: ReadinessProbe,
        keys: KeyRing,
        reception: Reception,
        *,
        host: str,
        port: int,
        tls: CertificateSource | None,
        reflection: bool,
    ) -> None:
        """`parts`: the services. `reflection`: whether clients may ask for the contracts."""
        methods = {path: one for part in parts for path, one in part.methods().items()}
        services = sorted({path.split("/")[1] for path in methods})
        if reflection:
            methods |= reflection_methods((*services, HEALTH))
        self._health = HealthServicer(services, probe.ready)
        methods |= health_methods(self._health)
        self._server = PublicServer(
            host,
            port,
            RequestInterceptor(methods, keys, reception, serving.metrics, serving.client_stall_s),
            longest_call_s=serving.longest_s,
            tls=tls,
        )
        self._stopping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ConfigError if the port cannot be had."""
        log.info("listening for gRPC on %s", await self._server.start())

    def leave(self) -> None:
        """Tell health checks that no new work is wanted here; calls are still answered."""
        self._health.drain()

    def refuse(self, grace_s: float) -> None:
        """Send clients elsewhere from now on; what runs may go on for `grace_s`."""
        self._health.close()
        self._stopping = asyncio.create_task(self._server.stop(grace_s))

    async def stop(self) -> None:
        """Return when nothing runs any more."""
        if self._stopping is None:
            self.refuse(GRACE_S)
        assert self._stopping is not None
        await self._stopping


def front_certificates(
    ca: Path | None, cert: Path | None, key: Path | None
) -> CertificateSource | None:
    """The certificate of HTTPS, and the CA of clients' certificates; None for a port in clear.

    Raises:
        ConfigError: if they are not usable.
    """
    if cert is None or key is None:
        if ca is not None:
            raise ConfigError(
                "'public_grpc_ca_file' needs 'http_tls_cert_file' and 'http_tls_key_file'; give"
                " all three or leave it out"
            )
        return None
    return CertificateSource(CertificateFiles("http_tls", ca=ca, cert=cert, key=key))
