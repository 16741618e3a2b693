"""A listener that cannot accept connections for a while."""

import asyncio
import errno
import socket
from typing import cast

import pytest

from services.gateway.bounds import listener
from services.gateway.bounds.connections import (
    ClientConnection,
    ClientConnections,
    ConnectionLimits,
)
from services.gateway.bounds.listener import ConnectionListener
from tests.support.waiting import eventually

FAILURES = 5


class OutOfDescriptors:
    """A listening socket whose first calls of `accept` fail."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self.failures = 0

    def fileno(self) -> int:
        return self._listening.fileno()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.failures < FAILURES:
            self.failures += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listening.accept()

    def close(self) -> None:
        self._listening.close()


class Leaving(asyncio.Protocol):
    """Counts the end of its connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.leave()


async def test_accept_errors_are_logged_once_until_they_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "PAUSE_S", 0.01)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    address = listening.getsockname()
    failing = OutOfDescriptors(listening)
    connections = ClientConnections(ConnectionLimits(9, 9, restricted_max=3))
    serving = ConnectionListener(cast(socket.socket, failing), connections, "http", Leaving, None)
    _, writer = await asyncio.open_connection(*address)
    await eventually(lambda: connections.count("http") == 1)
    assert failing.failures == FAILURES
    assert len([record for record in caplog.records if "cannot accept" in record.message]) == 1
    writer.close()
    await eventually(lambda: connections.count("http") == 0)
    serving.close()
    await serving.wait_closed()
