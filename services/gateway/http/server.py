"""Runs uvicorn, the HTTP server, in the service's event loop, with TLS."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from services.common.address import listen
from services.common.errors import ConfigError
from services.common.timeouts import wait_set
from services.common.tls import CertificateFiles, Certificates, CertificateSource
from services.gateway.http.protocol import BoundedProtocol

log = logging.getLogger(__name__)


class ServerTls:
    """TLS with certificate rotation: new connections use the newest valid certificate."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Load the files.

        Raises:
            ConfigError: if the files are not a certificate and its key.
        """
        self._cert, self._key = cert, key
        self._source = CertificateSource(CertificateFiles("http_tls", cert=cert, key=key))
        self._loaded: Certificates = self._source.current()
        # TLS handshakes start with `context`; its SNI callback switches to the newest context.
        self.context = self._newest = self._load()
        self.context.sni_callback = self._choose

    def _choose(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        certificates = self._source.current()
        if certificates is not self._loaded:
            try:
                self._newest = self._load()
                self._loaded = certificates
            except (ssl.SSLError, OSError) as error:
                # The files changed again during the load; the next connection retries.
                log.warning("cannot load the new HTTPS certificate, the previous stays: %s", error)
        connection.context = self._newest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # uvicorn does not support HTTP/2.
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self._cert, self._key)
        return context


def server_tls(cert: Path | None, key: Path | None) -> ServerTls | None:
    """TLS with the given files; None without files: plain HTTP. Raises ConfigError."""
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        raise ConfigError(
            "'http_tls_cert_file' and 'http_tls_key_file' need each other; set both or none"
        )
    return ServerTls(cert, key)


BACKLOG = 2048
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

    def __init__(self, app: ASGIApp, tls: ServerTls | None, keep_alive_s: float) -> None:
        """`tls` None: plain HTTP. Idle connections close after `keep_alive_s`."""
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
                # Typed as whole seconds, but uvicorn passes it to call_later, which takes floats.
                timeout_keep_alive=keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=SHUTDOWN_S,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stop `serve`; running requests may continue for `SHUTDOWN_S`."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Tick once per second, for the Date header; uvicorn's loop ticks ten times."""
        while not await self.on_tick(0):
            await wait_set(self._stopping, TICK_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Keep the service's signal handlers."""
        yield
