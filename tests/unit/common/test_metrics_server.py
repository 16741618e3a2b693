"""The exposition of metrics over HTTP."""

import asyncio
import contextlib

import pytest
from prometheus_client import CollectorRegistry, Gauge

from services.common import metrics_server
from services.common.errors import ConfigError
from services.common.metrics_server import metrics_exposed

HOST = "127.0.0.1"


def a_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("depth", "Metres.", registry=registry).set(7)
    return registry


async def ask(port: int, request: bytes) -> bytes:
    """Return the server's response until it closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


async def test_a_scrape_returns_the_registry() -> None:
    async with metrics_exposed(a_registry(), HOST, 0) as port:
        head, _, body = (
            await ask(port, b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n")
        ).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: text/plain; version=0.0.4" in head
        assert f"Content-Length: {len(body)}".encode() in head
        assert b"depth 7.0\n" in body
        assert await ask(port, b"HEAD /metrics HTTP/1.1\r\n\r\n") == head + b"\r\n\r\n"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET / HTTP/1.1", b"404"),
        ("POST /metrics HTTP/1.1", b"405"),
        ("nonsense", b"405"),
        ("HEAD /metrics HTTP/1.1", b"200"),
    ],
)
async def test_other_requests_are_refused(request_line: str, status: bytes) -> None:
    async with metrics_exposed(a_registry(), HOST, 0) as port:
        answer = await ask(port, f"{request_line}\r\n\r\n".encode())
        assert answer.split()[1] == status
        assert b"depth" not in answer


async def test_a_too_long_request_head_ends_the_connection() -> None:
    async with metrics_exposed(a_registry(), HOST, 0) as port:
        head = b"GET /metrics HTTP/1.1\r\nX: " + b"y" * metrics_server.HEAD_BYTES_MAX * 2
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(head + b"\r\n\r\n")
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_silent_clients_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "CONNECTIONS_MAX", 1)
    async with metrics_exposed(a_registry(), HOST, 0) as port:
        with monkeypatch.context() as patch:
            patch.setattr(metrics_server, "EXCHANGE_TIMEOUT_S", 0.2)
            reader, writer = await asyncio.open_connection(HOST, port)
            async with asyncio.timeout(30):
                assert await reader.read() == b""  # it was closed, although it sent nothing
        assert b"depth 7.0" in await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        writer.close()


async def test_a_port_in_use_is_a_short_error() -> None:
    async with metrics_exposed(a_registry(), HOST, 0) as port:
        with pytest.raises(ConfigError, match="choose another metrics_port"):
            async with metrics_exposed(a_registry(), HOST, port):
                pass


async def test_no_server_runs_without_a_port() -> None:
    async with metrics_exposed(a_registry(), HOST, None) as port:
        assert port == 0
