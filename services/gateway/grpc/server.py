"""The public gRPC server: limits, TLS."""

import grpc.aio

from services.common.address import join_address
from services.common.errors import ConfigError
from services.common.grpc_client import MESSAGE_BYTES_MAX as ANSWER_BYTES_MAX
from services.common.tls import CertificateSource
from services.common.transport import server_credentials
from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.grpc.interceptors import GrpcFrontDoor

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
        door: GrpcFrontDoor,
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
