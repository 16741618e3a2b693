"""Ports for the servers of tests that run at once."""

import os
import random
import socket
from contextlib import suppress

from tideserve.cli.local_cluster import OWN_PORTS

# The processes of a parallel run have disjoint ports.
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_ports = list(OWN_PORTS[_NUMBER::_PROCESSES])
random.Random().shuffle(_ports)


def free_port() -> int:
    """An unused port; no other call returns it soon, although its server may start late."""
    for place, port in enumerate(_ports):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _ports.append(_ports.pop(place))
            return port
    raise AssertionError("no port is free")
