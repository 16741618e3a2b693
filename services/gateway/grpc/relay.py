"""Relays the connections of gRPC clients to gRPC's server, over a Unix socket.

The relay does what gRPC's server cannot: it limits connections, their TLS handshakes and header
blocks, and knows which of them are idle. It adds the number of the connection to each call.
"""

import asyncio
import itertools
import socket
from collections.abc import Mapping

from services.common.timeouts import timeout
from services.common.tls import ServerTls
from services.gateway.bounds.connections import ClientConnection, ClientConnections, CloseReason
from services.gateway.bounds.listener import ConnectionListener
from services.gateway.grpc.header_blocks import (
    PREFACE,
    BlockTooLarge,
    HeaderBlocks,
    InvalidFrames,
)

PORT = "grpc"
CONNECTION_HEADER = "x-tideserve-connection"
DESCRIPTORS = 3
"""Of a connection: to the client, and both ends of the one to gRPC's server."""
PREFACE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0


class Relay:
    """Relays the connections of a listening socket to the Unix socket at `path`."""

    def __init__(self, connections: ClientConnections, tls: ServerTls | None) -> None:
        """`tls`: of the clients' connections; None: no TLS."""
        self._connections = connections
        self._tls = tls
        self._numbers = itertools.count(1)
        self._clients: dict[str, _ClientSide] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._listener: ConnectionListener | None = None
        # For calls whose connection is gone.
        self._gone = connections.enter(PORT, "", 0)
        self._gone.leave()

    def start(self, listening: socket.socket, path: str) -> None:
        """Accept connections."""
        self._listener = ConnectionListener(
            listening,
            self._connections,
            PORT,
            lambda connection: _ClientSide(self, connection, str(next(self._numbers)), path),
            None if self._tls is None else self._tls.context,
            DESCRIPTORS,
        )

    def connection(self, metadata: Mapping[str, str | bytes]) -> ClientConnection:
        """The connection of a call; one that admits nothing if it has ended."""
        client = self._clients.get(str(metadata.get(CONNECTION_HEADER)))
        return self._gone if client is None else client.connection

    def refuse(self) -> None:
        """Accept no more connections."""
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Wait until the clients have what gRPC's server sent; end their connections."""
        self.refuse()
        try:
            async with timeout(CLOSE_TIMEOUT_S):
                await self._empty.wait()
        except TimeoutError:
            for client in list(self._clients.values()):
                client.connection.close()
            await self._empty.wait()
        if self._listener is not None:
            await self._listener.wait_closed()

    def add(self, client: "_ClientSide") -> None:
        """Add a connection, after its TLS handshake."""
        self._clients[client.number] = client
        self._empty.clear()

    def forget(self, client: "_ClientSide") -> None:
        """Remove a connection that has ended."""
        del self._clients[client.number]
        if not self._clients:
            self._empty.set()


class _ClientSide(asyncio.Protocol):
    """The connection of a client; connects to gRPC's server after the client's preface."""

    transport: asyncio.Transport
    _server: "_ServerSide | None" = None
    _connecting: asyncio.Task[None] | None = None

    def __init__(self, relay: Relay, connection: ClientConnection, number: str, path: str) -> None:
        self._relay = relay
        self.connection = connection
        self.number = number
        self._path = path
        self._blocks = HeaderBlocks(CONNECTION_HEADER, number)
        self._received = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.connection.close = transport.abort
        self._relay.add(self)
        self._timer = asyncio.get_running_loop().call_later(
            PREFACE_TIMEOUT_S, self.connection.drop, CloseReason.INVALID
        )

    def data_received(self, data: bytes) -> None:
        if self._server is not None:
            self._forward(data)
            return
        self._received += data
        begun = self._received[: len(PREFACE)]
        if not PREFACE.startswith(begun):
            self.connection.drop(CloseReason.INVALID)
        elif begun == PREFACE and self._connecting is None:
            self._timer.cancel()
            self.transport.pause_reading()
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with timeout(CONNECT_TIMEOUT_S):
                await loop.create_unix_connection(lambda: _ServerSide(self), self._path)
        except OSError:
            self.transport.abort()

    def connected(self, server: "_ServerSide") -> None:
        """Forward what the client has sent so far."""
        if self.transport.is_closing():
            server.transport.abort()
            return
        self._server = server
        received, self._received = self._received, b""
        server.transport.write(PREFACE)
        self._forward(received[len(PREFACE) :])
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _forward(self, data: bytes) -> None:
        assert self._server is not None
        try:
            parts = self._blocks.feed(data)
        except InvalidFrames:
            self.connection.drop(CloseReason.INVALID)
        except BlockTooLarge:
            self.connection.drop(CloseReason.HEADERS)
        else:
            self._server.transport.writelines(parts)

    def pause_writing(self) -> None:
        if self._server is not None:
            _pause(self._server.transport)

    def resume_writing(self) -> None:
        if self._server is not None:
            _resume(self._server.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        if self._server is not None:
            self._server.transport.abort()
        self.connection.leave()
        self._relay.forget(self)


class _ServerSide(asyncio.Protocol):
    """The connection of a client to gRPC's server."""

    transport: asyncio.Transport

    def __init__(self, client: _ClientSide) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._client.connected(self)

    def data_received(self, data: bytes) -> None:
        self._client.transport.write(data)

    def pause_writing(self) -> None:
        _pause(self._client.transport)

    def resume_writing(self) -> None:
        _resume(self._client.transport)

    def connection_lost(self, exc: Exception | None) -> None:
        # The client still gets what was sent.
        self._client.transport.close()


def _pause(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.pause_reading()


def _resume(transport: asyncio.Transport) -> None:
    if not transport.is_closing():
        transport.resume_reading()
