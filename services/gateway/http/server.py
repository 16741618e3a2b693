"""The HTTP server: uvicorn inside the service's own event loop."""

import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.common.errors import ConfigError
from services.gateway.http.protocol import BoundedProtocol
from services.gateway.http.tls import ServerTls

BACKLOG = 2048
SHUTDOWN_S = 2


def bind(host: str, port: int, stall_s: float) -> socket.socket:
    """A listening address; connections that take no data for `stall_s` are cut by the kernel.

    Raises:
        ConfigError: if the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"'{host}' is no address of this machine: {error.strerror}") from error
    # With its protocol: asyncio sends small parts of answers at once only if it knows that one.
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
        listener.bind(address)
        # At once, so that a second process cannot share the address until the server starts.
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what listens there or choose another port"
            ) from error
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn that leaves signals to the service."""

    def __init__(self, app: ASGIApp, tls: ServerTls | None = None) -> None:
        """`tls`: for HTTPS; None: in clear."""
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
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the service's handlers as they are."""
        yield
