"""The public gRPC port: its parts, and their life beside the other ports."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from services.common.errors import ConfigError
from services.common.health import HealthServicer
from services.common.tls import CertificateFiles, CertificateSource
from services.gateway.cluster.readiness import ReadinessProbe
from services.gateway.grpc.health import SERVICE as HEALTH
from services.gateway.grpc.health import health_methods
from services.gateway.grpc.interceptors import GrpcFrontDoor, Method
from services.gateway.grpc.reflection import reflection_methods
from services.gateway.grpc.server import PublicServer
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.reception import Reception
from services.gateway.serving.serving import RequestServing

# Calls that end with the gateway's drain have that long to tell their clients.
GRACE_S = 2.0

log = logging.getLogger(__name__)


class Offer(Protocol):
    """A service."""

    def methods(self) -> dict[str, Method]:
        """Its methods by full name."""


class GrpcPort:
    """Serves clients over gRPC until it is drained."""

    def __init__(
        self,
        parts: Sequence[Offer],
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
            GrpcFrontDoor(methods, keys, reception, serving.metrics, serving.client_stall_s),
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
