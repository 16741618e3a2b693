"""HTTPS with a real server: its certificate changes below open connections."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import ConfigError
from services.common.tls import ServerTls
from services.gateway.bounds.connections import ClientConnections, ConnectionLimits
from services.gateway.http.server import HttpServer, bind, server_tls
from tests.support.certified import DAY, Certified
from tests.support.waiting import eventually
from tideserve.cli.certificates import write_pair

HOSTS = ("localhost", "127.0.0.1")
TIMEOUT_S = 20.0


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    certified = Certified(tmp_path)
    renew(certified)
    return certified


def renew(certified: Certified) -> None:
    write_pair(certified.folder, "http", certified.authority.issue("http", HOSTS, DAY))


def tls_of(certified: Certified) -> ServerTls:
    files = certified.files("http")
    tls = server_tls(files.cert, files.key)
    assert tls is not None
    return tls


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the scheme of the request."""
    body = scope["scheme"].encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(tls: ServerTls) -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0, 5.0)
    connections = ClientConnections(ConnectionLimits(100, 100, restricted_max=9))
    server = HttpServer(app, tls, 5.0, connections, "http")
    running = asyncio.create_task(server.serve([listener]))

    async def started() -> bool:
        return server.started

    await eventually(started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.stop()
        await running
        listener.close()


class Connection:
    """A client with its own TLS connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def opened(cls, certified: Certified, port: int, host: str) -> "Connection":
        trust = ssl.create_default_context(cafile=certified.ca_file)
        return cls(*await asyncio.open_connection(host, port, ssl=trust, server_hostname=host))

    @property
    def certificate(self) -> str:
        shown = self.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return ssl.DER_cert_to_PEM_cert(shown)

    async def answer(self) -> bytes:
        self.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        return await self._reader.readexactly(len(b"https"))


@pytest.mark.parametrize("host", HOSTS)
async def test_new_connections_use_a_new_certificate(certified: Certified, host: str) -> None:
    """With a host name, which clients send in the handshake, and with an address."""
    async with asyncio.timeout(TIMEOUT_S), serving(tls_of(certified)) as port:
        old = await Connection.opened(certified, port, host)
        first = (certified.folder / "http.pem").read_text()
        assert (await old.answer(), old.certificate) == (b"https", first)
        renew(certified)
        second = (certified.folder / "http.pem").read_text()
        new = await Connection.opened(certified, port, host)
        assert (await new.answer(), new.certificate) == (b"https", second)
        assert (await old.answer(), old.certificate) == (b"https", first)
        assert second != first
        for connection in (old, new):
            connection.writer.transport.abort()


async def test_a_mismatched_pair_is_not_loaded(certified: Certified) -> None:
    async with asyncio.timeout(TIMEOUT_S), serving(tls_of(certified)) as port:
        first = (certified.folder / "http.pem").read_text()
        issued = certified.authority.issue("http", HOSTS, DAY)
        (certified.folder / "http.pem").write_bytes(issued.cert)
        connection = await Connection.opened(certified, port, "localhost")
        assert (await connection.answer(), connection.certificate) == (b"https", first)
        connection.writer.transport.abort()


async def test_plain_http_is_refused(certified: Certified) -> None:
    async with asyncio.timeout(TIMEOUT_S), serving(tls_of(certified)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in await reader.read()
        writer.transport.abort()


def test_a_missing_file_of_the_pair_is_a_short_error(certified: Certified) -> None:
    with pytest.raises(ConfigError, match="'http_tls_key_file' need each other"):
        server_tls(certified.files("http").cert, None)
    assert server_tls(None, None) is None
