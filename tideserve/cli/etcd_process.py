"""etcd of a cluster: a running etcd by URL, or a private etcd on loopback."""

import asyncio
import contextlib
import json
import os
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from services.common.config import from_mapping
from services.common.errors import ConfigError, StoreError
from services.common.service_config import ServiceConfig
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError, unusable
from tideserve.cli.etcd_binary import EtcdBinary
from tideserve.cli.process import Program, child_environment

if TYPE_CHECKING:
    from services.common.etcd import Store

T = TypeVar("T")
GIVEN_TIMEOUT_S = 3.0
CLAIM = "starting"
"""The key of a cluster that is being started; see `claim_given_etcd`."""
CLAIM_TTL_S = 60
STOP_GRACE_S = 5.0
PROBE_TIMEOUT_S = 1.0
HEARTBEAT_MS, ELECTION_MS = "50", "250"
"""A single member elects itself after the election timeout, so etcd answers within 0.3 s; with
etcd's default timeouts it takes up to 1 s. Shorter timeouts would cost CPU time while idle."""
QUOTA_BYTES = 2 * 2**30
"""Size of the data above which etcd raises its alarm NOSPACE and refuses writes."""
RELIEVED_PART = 0.5
"""Maximum fraction of the quota in use at which the alarm is disarmed."""
MAINTENANCE_TIMEOUT_S = 5.0
HISTORY = "10m"
"""Retention of old revisions. A service that was suspended for longer reads all keys again."""


def check_given_etcd(access: Mapping[str, Any]) -> None:
    """Check that etcd answers and that no cluster uses it.

    `access`: the keys of a service's configuration that begin with etcd_. Two clusters that share a
    prefix would each use the other's workers and services.

    Raises:
        CommandError: if etcd does not answer within seconds or denies access, the URL is invalid,
            or services are registered.
    """
    _with_store(access, _check_unused)


def claim_given_etcd(access: Mapping[str, Any]) -> int:
    """Check etcd as `check_given_etcd` does, and keep other clusters from starting with it.

    Returns the lease of the claim, which ends after `CLAIM_TTL_S`; by then services of this cluster
    have registered.

    Raises:
        CommandError: as `check_given_etcd`, and if another cluster is being started.
    """

    async def claim(store: "Store") -> int:
        lease = await store.grant_lease(CLAIM_TTL_S)
        claimant = f"process {os.getpid()} on {socket.gethostname()}"
        if not await store.put_if(CLAIM, claimant.encode(), 0, lease):
            other = await store.read(CLAIM)
            raise CommandError(
                f"another cluster is being started with the etcd at {store.url}"
                f" ({other.value.decode(errors='replace') if other else 'it has just ended'}); stop"
                " it, use another etcd or another 'etcd_prefix' (in section 'services'), or, if it"
                f" was killed, wait {CLAIM_TTL_S} s",
                EXIT_UNUSABLE,
            )
        try:
            await _check_unused(store)
        except BaseException:
            await store.revoke_lease(lease)
            raise
        return lease

    return _with_store(access, claim)


def release_given_etcd(access: Mapping[str, Any], lease: int) -> None:
    """End a claim early; without an answer of etcd it ends with its lease."""
    with contextlib.suppress(CommandError):
        _with_store(access, lambda store: store.revoke_lease(lease))


async def _check_unused(store: "Store") -> None:
    """Raise CommandError if services or workers are registered."""
    # A slow import (gRPC), needed only for a given etcd.
    from services.common.membership import SERVICES, WORKERS

    listings = [await store.list_prefix(prefix) for prefix in (SERVICES, WORKERS)]
    keys = [key for listing in listings for key in listing]
    if keys:
        raise CommandError(
            f"another cluster uses the etcd at {store.url} ({keys[0]} is registered);"
            " stop it, use another etcd or another 'etcd_prefix' (in section 'services'), or, if it"
            " was killed, wait until its leases have expired (--lease-ttl, by default 10 s)",
            EXIT_UNUSABLE,
        )


def _with_store(access: Mapping[str, Any], operation: "Callable[[Store], Awaitable[T]]") -> T:
    """Run an operation on a connected store. Raises CommandError."""
    from services.common.etcd import open_store

    async def run() -> T:
        store = open_store(from_mapping(ServiceConfig, access, "section 'services'"))
        try:
            await store.connect(GIVEN_TIMEOUT_S)
            return await operation(store)
        finally:
            await store.close()

    with unusable(ConfigError, StoreError):
        return asyncio.run(run())


def free_loopback_ports(count: int) -> list[int]:
    """Distinct loopback ports that are free at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for probe in sockets:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def private_etcd(binary: EtcdBinary, folder: ClusterFolder) -> tuple[Program, str]:
    """The program of a private etcd on free ports, and its URL."""
    client_port, peer_port = free_loopback_ports(2)
    url, peer_url = f"http://127.0.0.1:{client_port}", f"http://127.0.0.1:{peer_port}"
    environment = child_environment({})
    # etcd reads flags from ETCD_ variables as well; these belong to another etcd.
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
        *("--quota-backend-bytes", str(QUOTA_BYTES)),
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
    """Whether the etcd at `url` reports itself healthy: it has a leader and can commit."""
    # A slow import (httpx), done here while etcd starts.
    from tideserve.cli.client import HttpClient

    with HttpClient(url, timeout_s=PROBE_TIMEOUT_S) as client:
        response = client.probe("/health")
    # The body repeats the status code.
    return response is not None and response.is_success


def relieve(url: str) -> bool | None:
    """Compact, defragment and disarm the private etcd if its alarm NOSPACE is raised.

    Returns whether the alarm remains; None if etcd does not answer.
    """
    try:
        status = _maintain(url, "maintenance/status")
        if not any("NOSPACE" in error for error in status.get("errors", ())):
            return False
        header = status["header"]
        # etcd refuses a second compaction at the same revision.
        with contextlib.suppress(urllib.error.HTTPError):
            _maintain(url, "kv/compaction", revision=header["revision"], physical=True)
        if int(_maintain(url, "maintenance/status")["dbSizeInUse"]) > RELIEVED_PART * QUOTA_BYTES:
            return True
        _maintain(url, "maintenance/defragment")
        alarm = {"memberID": header["member_id"], "alarm": "NOSPACE"}
        _maintain(url, "maintenance/alarm", action="DEACTIVATE", **alarm)
    except (OSError, HTTPException, ValueError, KeyError):
        return None
    return False


def _maintain(url: str, path: str, **body: object) -> dict[str, Any]:
    """Call etcd's JSON interface. Raises OSError, HTTPException, ValueError."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v3/{path}", data, headers)
    # Not httpx, whose client takes milliseconds to create; this is called every few seconds.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=MAINTENANCE_TIMEOUT_S) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _dying_with_parent() -> list[str]:
    wrapper = Path(__file__).with_name("with_parent.py")
    return [sys.executable, "-I", str(wrapper), str(os.getpid())]
