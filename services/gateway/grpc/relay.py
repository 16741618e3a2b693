"""Relays the connections of gRPC clients to gRPC's server, over a Unix socket.

The relay does what gRPC's server cannot: it limits connections, their TLS handshakes, header
blocks and small frames, and knows which of them are idle. It adds the token of the connection to
each call; without a token, only probes are served.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from math import inf
from weakref import WeakValueDictionary

from services.common.timeouts import timeout
from services.common.tls import ServerTls
from services.gateway.bounds.connections import (
    ClientConnection,
    ClientConnections,
    CloseReason,
    client_of,
)
from services.gateway.bounds.listener import ConnectionListener
from services.gateway.grpc.frame_budget import READ_STEPS, FrameBudget
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
BLOCK_TIMEOUT_S = 10.0
"""From the first to the last byte of a header block."""
READ_BYTES = 16 * 2**10
"""Bytes that a connection reads in a turn of the loop, and may keep while it waits."""
CONNECT_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 2.0


class Relay:
    """Relays the connections of a listening socket to an abstract Unix socket of this process."""

    def __init__(self, connections: ClientConnections, tls: ServerTls | None) -> None:
        """`tls`: of the clients' connections; None: no TLS."""
        self._connections = connections
        self._tls = tls
        # By token.
        self._clients: dict[str, _ClientSide] = {}
        self._budgets: WeakValueDictionary[str, FrameBudget] = WeakValueDictionary()
        # All connections read into it, and copy what they have read at once.
        self.buffer = memoryview(bytearray(READ_BYTES))
        self._empty = asyncio.Event()
        self._empty.set()
        self._listener: ConnectionListener | None = None
        # For calls whose connection is gone.
        self._gone = connections.enter(PORT, "", 0)
        self._gone.leave()

    def start(self, listening: socket.socket, name: str) -> None:
        """Accept connections; `name`: of the Unix socket."""
        self._listener = ConnectionListener(
            listening,
            self._connections,
            PORT,
            lambda connection: _ClientSide(self, connection, name),
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
        self._clients[client.token] = client
        self._empty.clear()

    def budget(self, address: str) -> FrameBudget:
        """The budget of an address, as long as a connection of it holds the budget."""
        return self._budgets.setdefault(client_of(address), FrameBudget())

    def forget(self, client: "_ClientSide") -> None:
        """Remove a connection that has ended."""
        del self._clients[client.token]
        if not self._clients:
            self._empty.set()


class _ClientSide(asyncio.BufferedProtocol):
    """The connection of a client; connects to gRPC's server after the client's preface."""

    transport: asyncio.Transport
    _server: "_ServerSide | None" = None
    _connecting: asyncio.Task[None] | None = None
    _congested = False

    def __init__(self, relay: Relay, connection: ClientConnection, name: str) -> None:
        self._relay = relay
        self.connection = connection
        # No client can guess the token of another one.
        self.token = secrets.token_hex(16)
        self._name = name
        self._blocks = HeaderBlocks(CONNECTION_HEADER, self.token)
        self._budget = relay.budget(connection.address)
        # What has been read and not forwarded: before the connection to the server, and while it
        # waits for the budget.
        self._received = b""
        # The header block that has a deadline.
        self._timed_block = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.connection.close = transport.abort
        self._relay.add(self)
        self._start_timer(PREFACE_TIMEOUT_S, CloseReason.INVALID)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._relay.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received += bytes(self._relay.buffer[:nbytes])
        if self._server is not None:
            self._forward()
            return
        begun = self._received[: len(PREFACE)]
        if not PREFACE.startswith(begun):
            self.connection.drop(CloseReason.INVALID)
        elif begun == PREFACE and self._connecting is None:
            self._timer.cancel()
            self.transport.pause_reading()
            self._connecting = asyncio.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            async with timeout(CONNECT_TIMEOUT_S):
                await _connect(self._name, lambda: _ServerSide(self))
        except OSError:
            self.transport.abort()

    def connected(self, server: "_ServerSide") -> None:
        """Forward what the client has sent so far."""
        if self.transport.is_closing():
            server.transport.abort()
            return
        self._server = server
        server.transport.write(PREFACE)
        self._received = self._received[len(PREFACE) :]
        self._forward()
        self._update_reading()

    def _forward(self) -> None:
        """Forward what has been received, or wait for the budget with the rest."""
        self._feed(READ_STEPS)
        if self._received and self._budget.available:
            self._spend()
        if self._received:
            self._budget.wait(self, self._proceed)
            self._update_reading()

    def _spend(self) -> None:
        before = self._blocks.steps
        self._feed()
        self._budget.spend(self._blocks.steps - before)

    def _proceed(self) -> None:
        """Forward the rest, when the budget permits."""
        if not self.transport.is_closing():
            self._spend()
            self._update_reading()

    def _feed(self, steps_max: float = inf) -> None:
        assert self._server is not None
        received, self._received = self._received, b""
        try:
            parts, self._received = self._blocks.feed(received, steps_max)
        except InvalidFrames:
            self.connection.drop(CloseReason.INVALID)
        except BlockTooLarge:
            self.connection.drop(CloseReason.HEADERS)
        else:
            self._server.transport.writelines(parts)
            self._time_block()

    def _time_block(self) -> None:
        """Give each header block its deadline."""
        block = self._blocks.block_stream
        if block != self._timed_block:
            self._timed_block = block
            self._timer.cancel()
            if block:
                self._start_timer(BLOCK_TIMEOUT_S, CloseReason.HEADERS)

    def _start_timer(self, delay_s: float, reason: CloseReason) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self.connection.drop, reason)

    def _update_reading(self) -> None:
        """Read while neither the budget nor gRPC's server holds the client back."""
        if self.transport.is_closing():
            return
        if self._congested or self._received:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def congest(self, congested: bool) -> None:
        """Whether gRPC's server takes no more bytes."""
        self._congested = congested
        self._update_reading()

    def pause_writing(self) -> None:
        if self._server is not None and not self._server.transport.is_closing():
            self._server.transport.pause_reading()

    def resume_writing(self) -> None:
        if self._server is not None and not self._server.transport.is_closing():
            self._server.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._budget.forget(self)
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
        self._client.congest(True)

    def resume_writing(self) -> None:
        self._client.congest(False)

    def connection_lost(self, exc: Exception | None) -> None:
        # The client still gets what was sent.
        self._client.transport.close()


async def _connect(name: str, protocol: Callable[[], asyncio.Protocol]) -> None:
    """Connect to an abstract Unix socket of this process. Raises OSError."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as opened:
        unix = opened.enter_context(socket.socket(socket.AF_UNIX))
        unix.setblocking(False)
        await loop.sock_connect(unix, f"\0{name}")
        credentials = unix.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        # Another process may take the name once this one's server has stopped.
        if struct.unpack("3i", credentials)[0] != os.getpid():
            raise ConnectionRefusedError
        opened.pop_all()
    # From here on uvloop closes the descriptor. It detaches the socket only from a transport that
    # is closed after this call: otherwise the socket would close the next file with that number.
    closing = True
    try:
        transport, _ = await loop.create_unix_connection(protocol, sock=unix)
        closing = transport.is_closing()
    finally:
        if closing:
            unix.detach()
