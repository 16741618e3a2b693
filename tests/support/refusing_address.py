"""An address that refuses every connection during a test."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refusing_address() -> Iterator[str]:
    """host:port of a bound socket that does not listen, so that no other process takes the port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        host, port = bound.getsockname()
        yield f"{host}:{port}"
