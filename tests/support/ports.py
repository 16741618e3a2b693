"""Ports for the servers of tests that run at once."""

import os
from itertools import cycle, islice
from random import sample

from tideserve.cli.local_cluster import OWN_PORTS, first_free

# The processes of a parallel run have disjoint ports.
_NUMBER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_OWN = OWN_PORTS[_NUMBER::_PROCESSES]
_order = cycle(sample(_OWN, len(_OWN)))


def free_port() -> int:
    """An unused port; no other call returns it soon, although its server may start late."""
    return first_free(islice(_order, len(_OWN)))
