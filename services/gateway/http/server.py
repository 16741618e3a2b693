"""The HTTP server: uvicorn inside the service's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.common.address import listen
from services.common.timeouts import wait_set
from services.gateway.http.protocol import BoundedProtocol
from services.gateway.http.tls import ServerTls

BACKLOG = 2048
SHUTDOWN_S = 2
TICK_S = 1.0


def bind(host: str, port: int, stall_s: float) -> socket.socket:
    """A listening address; connections that take no data for `stall_s` are cut by the kernel.

    Raises:
        ConfigError: if the address cannot be had.
    """
    # It listens at once, so that a second process cannot share the address until the server starts.
    listener = listen(host, port, BACKLOG, stall_s)
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to the service, and rests between requests."""

    def __init__(self, app: ASGIApp, tls: ServerTls | None, keep_alive_s: float) -> None:
        """`tls`: for HTTPS; None: in clear. Idle connections are closed after `keep_alive_s`."""
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
                backlog=BACKLOG,
                # uvicorn says whole seconds, and hands this to the event loop, which takes parts.
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `serve` soon: requests that run may finish, for `SHUTDOWN_S` at most."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wake once a second, for the date that answers have; uvicorn's own wakes ten times."""
        while not await self.on_tick(0):
            await wait_set(self._stopping, TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the service's handlers as they are."""
        yield
