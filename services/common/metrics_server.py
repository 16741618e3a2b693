"""Prometheus exposition for services that have no HTTP server of their own."""

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, start_http_server

from services.common.errors import ConfigError


@contextmanager
def metrics_exposed(registry: CollectorRegistry, host: str, port: int | None) -> Iterator[int]:
    """Serve `registry` at http://host:port/metrics from a thread; None: not at all, 0: any port.

    Yields the port, 0 for none.

    Raises:
        ConfigError: if the port cannot be bound.
    """
    if port is None:
        yield 0
        return
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; choose another metrics_port"
        ) from error
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
