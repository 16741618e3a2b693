"""etcd for a cluster: a running one by URL, or a private one on loopback."""

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.config import from_mapping
from services.common.errors import ConfigError, StoreError
from services.common.service_config import ServiceConfig
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable
from tideserve.cli.etcd_binary import EtcdBinary
from tideserve.cli.process import Program, child_environment

GIVEN_TIMEOUT_S = 3.0
STOP_GRACE_S = 5.0
PROBE_TIMEOUT_S = 1.0
HEARTBEAT_MS, ELECTION_MS = "50", "250"
"""A single member elects itself after such a time: it answers within 0.3 s, and after up to 1 s
with etcd's own times. Shorter ones would cost more of a processor while nothing happens."""
HISTORY = "10m"
"""So long etcd remembers what was. A service that has stood still for longer reads all anew."""


def check_given_etcd(access: Mapping[str, Any]) -> None:
    """Make sure that an etcd answers and has no cluster.

    `access`: the keys of a service's configuration that begin with etcd_. Two clusters with the
    same keys would take each other's workers and services for their own.

    Raises:
        CommandError: if it does not answer within seconds or lets nobody in, the URL is not one, or
            somebody is registered there.
    """
    # Loading gRPC takes a moment, and only this way of starting needs it.
    from services.common.etcd import open_store
    from services.common.membership import SERVICES, WORKERS

    async def registered() -> list[str]:
        store = open_store(from_mapping(ServiceConfig, access, "section 'services'"))
        try:
            await store.connect(GIVEN_TIMEOUT_S)
            listings = [await store.list_prefix(prefix) for prefix in (SERVICES, WORKERS)]
        finally:
            await store.close()
        return [key for listing in listings for key in listing]

    with unusable(ConfigError, StoreError):
        keys = asyncio.run(registered())
    if keys:
        raise CommandError(
            f"another cluster uses the etcd at {access['etcd_url']} ({keys[0]} is registered);"
            " stop it, use another etcd or another 'etcd_prefix' (in section 'services'), or if it"
            " was killed just now, wait until its leases have ended (10 s unless --lease-ttl said"
            " otherwise)",
            EXIT_UNUSABLE,
        )


def free_loopback_ports(count: int) -> list[int]:
    """Different ports that nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def private_etcd(binary: EtcdBinary, folder: ClusterFolder) -> tuple[Program, str]:
    """How to start a private etcd with ports of its own, and its URL."""
    client_port, peer_port = free_loopback_ports(2)
    url, peer_url = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    environment = child_environment({})
    # etcd takes every flag from its environment too; none of these were meant for this one.
    for key in [key for key in environment if key.startswith("ETCD_")]:
        del environment[key]
    command = [
        *("--name", "tideserve"),
        *("--data-dir", str(folder.etcd_data)),
        *("--listen-client-urls", url),
        *("--advertise-client-urls", url),
        *("--listen-peer-urls", peer_url),
        *("--initial-advertise-peer-urls", peer_url),
        *("--initial-cluster", f"tideserve={peer_url}"),
        *("--heartbeat-interval", HEARTBEAT_MS),
        *("--election-timeout", ELECTION_MS),
        *("--auto-compaction-mode", "periodic"),
        *("--auto-compaction-retention", HISTORY),
        *("--logger", "zap"),
        *("--log-level", "warn"),
        *binary.checks,
    ]
    program = Program(
        name="etcd",
        command=[*_dying_with_parent(), str(binary.path), *command],
        log_path=folder.log_path("etcd"),
        folder=folder.root,
        environment=environment,
        stop_grace_s=STOP_GRACE_S,
    )
    return program, url


def answers(url: str) -> bool:
    """Whether the etcd at `url` says that it is healthy (it has a leader and can commit)."""
    # Loading httpx takes as long as etcd needs to start, so it is loaded meanwhile.
    from tideserve.cli.client import HttpClient

    with HttpClient(url, timeout_s=PROBE_TIMEOUT_S) as client:
        response = client.probe("/health")
    # The body, {"health": "true"}, says the same as the status.
    return response is not None and response.is_success


def _dying_with_parent() -> list[str]:
    wrapper = Path(__file__).with_name("with_parent.py")
    return [sys.executable, "-I", str(wrapper), str(os.getpid())]
