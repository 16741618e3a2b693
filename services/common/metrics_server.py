"""Serves Prometheus metrics on a port of its own, with a small HTTP server.

It runs on the service's event loop, so that collectors read the state of its tasks without locks.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry, generate_latest

from services.common.errors import ConfigError
from services.common.timeouts import timeout

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"
CONNECTIONS_MAX = 16
HEAD_BYTES_MAX = 16 * 2**10
EXCHANGE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)


@asynccontextmanager
async def metrics_exposed(
    registry: CollectorRegistry, host: str, port: int | None
) -> AsyncIterator[int]:
    """Serve `registry` at http://host:port/metrics during the body, unless `port` is None.

    Port 0 is any free port. Yields the bound port; 0 without a server.

    Raises:
        ConfigError: if the port cannot be bound.
    """
    if port is None:
        yield 0
        return
    exposition = _Exposition(registry)
    try:
        server = await asyncio.start_server(
            exposition.serve_connection, host, port, limit=HEAD_BYTES_MAX, reuse_address=True
        )
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another metrics_port"
        ) from error
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await exposition.close_all()


class _Exposition:
    """Answers a single request per connection, on up to `CONNECTIONS_MAX` connections."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._connections: set[asyncio.Task[None]] = set()

    async def serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve a connection; closes it if it is too slow or exceeds the limit."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) < CONNECTIONS_MAX:
            self._connections.add(task)
            try:
                async with timeout(EXCHANGE_TIMEOUT_S):
                    await self._answer(reader, writer)
            except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError) as error:
                log.debug("a scrape was interrupted: %r", error)
            finally:
                self._connections.discard(task)
        writer.close()

    async def close_all(self) -> None:
        """Close all connections."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split()
        method, path = (parts[0], parts[1].partition("?")[0]) if len(parts) == 3 else ("", "")
        if method not in ("GET", "HEAD"):
            status, body = "405 Method Not Allowed", b"only GET is served here\n"
        elif path != PATH:
            status, body = "404 Not Found", b"metrics are at /metrics\n"
        else:
            status, body = "200 OK", generate_latest(self._registry)
        lines = [
            f"HTTP/1.1 {status}",
            f"Content-Type: {CONTENT_TYPE}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body))
        # A scraper that has disconnected needs no answer.
        with suppress(ConnectionError):
            await writer.drain()
