"""Runs uvicorn, the HTTP server, in the service's event loop, with TLS."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from services.common.address import listen
from services.common.errors import ConfigError
from services.common.timeouts import wait_set
from services.common.tls import CertificateFiles, ServerTls
from services.gateway.bounds.connections import ClientConnection, ClientConnections
from services.gateway.bounds.listener import BACKLOG, ConnectionListener
from services.gateway.http.protocol import BoundedProtocol


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    """TLS with the given files; None without files: plain HTTP. Raises ConfigError."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError(
            "'http_tls_cert_file' and 'http_tls_key_file' need each other; set both or none"
        )
    # uvicorn does not support HTTP/2.
    return ServerTls(CertificateFiles("http_tls", cert=cert, key=key), "http/1.1")


SHUTDOWN_S = 2
TICK_S = 1.0


def bind(host: str, port: int, stall_s: float) -> socket.socket:
    """Open a listening socket. Connections that acknowledge no data for `stall_s` are reset.

    Raises:
        ConfigError: if the address cannot be bound.
    """
    # Listen right away, so that no second process can bind the address before the server starts.
    listener = listen(host, port, BACKLOG, stall_s)
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers, and with fewer wake-ups when idle."""

    def __init__(
        self,
        app: ASGIApp,
        tls: ServerTls | None,
        keep_alive_s: float,
        connections: ClientConnections,
        port: str,
    ) -> None:
        """`tls` None: plain HTTP. Idle connections close after `keep_alive_s`.

        `port`: the name of the port in logs and metrics.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                # Typed as whole seconds, but uvicorn passes it to call_later, which takes floats.
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=SHUTDOWN_S,
            )
        )
        self._tls = None if tls is None else tls.context
        self._connections = connections
        self._port = port
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stop `serve`; running requests may continue for `SHUTDOWN_S`."""
        self.should_exit = True
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on `sockets`."""

        def protocol_of(connection: ClientConnection) -> BoundedProtocol:
            return BoundedProtocol(connection, self.config, self.server_state)

        self.servers = [
            ConnectionListener(listening, self._connections, self._port, protocol_of, self._tls)  # type: ignore[misc]
            for listening in sockets or ()
        ]
        self.started = True

    async def main_loop(self) -> None:
        """Tick once per second, for the Date header; uvicorn's loop ticks ten times."""
        while not await self.on_tick(0):
            await wait_set(self._stopping, TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Keep the service's signal handlers."""
        yield
