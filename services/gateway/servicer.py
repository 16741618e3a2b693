"""The gateway's gRPC side: so far what every service answers, process state and health."""

import os
from collections.abc import Callable

from services.common.grpc_server import ProcessServicer, Server
from services.common.transport import Transport

HEALTH_NAME = "tideserve.gateway.v1.GatewayService"


def process_server(host: str, port: int, ready: Callable[[], bool], transport: Transport) -> Server:
    """A server, not started yet; `ready` tells whether the cluster accepts requests."""
    process = ProcessServicer("gateway", lambda: (os.getpid(),), ready)
    return Server(host, port, process, health_names=(HEALTH_NAME,), transport=transport)
