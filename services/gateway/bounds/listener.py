"""Accepts connections, and counts each of them before it costs more than its descriptor."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

from services.common.log_limiter import LOG_INTERVAL_S, LogLimiter
from services.gateway.bounds.connections import ClientConnection, ClientConnections, CloseReason

BACKLOG = 2048
ACCEPTS_MAX = 16
"""Connections accepted at a time: idle ones that make room close in the next turn of the loop."""
HANDSHAKE_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0
"""Timeouts of the start and the end of TLS."""
PAUSE_S = 1.0

log = logging.getLogger(__name__)


class ConnectionListener:
    """Serves the connections of a listening socket with a protocol each.

    A protocol sets `close` of its connection, and calls `leave` when the connection ends.
    """

    def __init__(
        self,
        listening: socket.socket,
        connections: ClientConnections,
        port: str,
        protocol_of: Callable[[ClientConnection], asyncio.Protocol | asyncio.BufferedProtocol],
        tls: ssl.SSLContext | None,
        descriptors: int = 1,
    ) -> None:
        """`port`: its name in logs and metrics; `descriptors`: see `ClientConnections.enter`."""
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._connections = connections
        self._port = port
        self._protocol_of = protocol_of
        self._tls = tls
        self._descriptors = descriptors
        self._opening: dict[asyncio.Task[None], ClientConnection] = {}
        self._limiter = LogLimiter()
        self._closed = False
        self._pause: asyncio.TimerHandle | None = None
        self._watch()

    def close(self) -> None:
        """Accept no more connections, and end those whose TLS handshake still runs."""
        if self._closed:
            return
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for connection in self._opening.values():
            connection.close()

    async def wait_closed(self) -> None:
        """Wait for the handshakes that `close` ended."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _watch(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_MAX):
            try:
                accepted, address = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory: the socket stays readable, so do not watch it.
                if self._limiter.due("accept") is not None:
                    log.warning(
                        "cannot accept connections on the %s port: %s; trying again each %g s,"
                        " without a line for %d s",
                        self._port,
                        error.strerror,
                        PAUSE_S,
                        LOG_INTERVAL_S,
                    )
                self._loop.remove_reader(self._socket)
                self._pause = self._loop.call_later(PAUSE_S, self._watch)
                return
            accepted.setblocking(False)
            connection = self._connections.enter(self._port, address[0], self._descriptors)
            # Not `task.cancel`: uvloop then loses the protocol's `connection_lost`.
            connection.close = partial(_shut_down, accepted)
            task = self._loop.create_task(self._open(accepted, connection))
            self._opening[task] = connection
            task.add_done_callback(self._opening.pop)

    async def _open(self, accepted: socket.socket, connection: ClientConnection) -> None:
        """Create the transport, after the TLS handshake if there is one."""
        timeouts: dict[str, Any] = {}
        if self._tls is not None:
            timeouts = {
                "ssl_handshake_timeout": HANDSHAKE_TIMEOUT_S,
                "ssl_shutdown_timeout": SHUTDOWN_TIMEOUT_S,
            }
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._protocol_of(connection), accepted, ssl=self._tls, **timeouts
            )
        except (OSError, RuntimeError):
            # TLS errors and timeouts are OSErrors; uvloop adds RuntimeErrors for lost connections.
            if connection.state != "left":
                connection.note(CloseReason.HANDSHAKE)
                connection.leave()


def _shut_down(accepted: socket.socket) -> None:
    """End a connection that has no protocol yet."""
    with contextlib.suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
