"""An address that refuses every connection for as long as a test needs it to."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refusing_address() -> Iterator[str]:
    """host:port of a socket that does not listen, and that keeps others from the port."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        host, port = bound.getsockname()
        yield f"{host}:{port}"
