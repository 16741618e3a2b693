"""The gateway's gRPC side: so far what every service answers, process state and health."""

import os
from collections.abc import Callable

from services.common.grpc_server import ProcessServicer, Server


def process_server(host: str, port: int, ready: Callable[[], bool]) -> Server:
    """A server, not started yet; `ready` tells whether the cluster accepts requests."""
    return Server(host, port, ProcessServicer("gateway", lambda: (os.getpid(),), ready))
