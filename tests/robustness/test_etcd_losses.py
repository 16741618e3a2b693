"""etcd loses a key, all keys, its latest writes or everything: the cluster recovers by itself."""

import asyncio
import os
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.etcd import SameCreation, Store
from tests.support.client import seeded_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

OUTPUT_TOKENS = 400
STREAMS = 4
WORKERS = {"worker-0", "worker-1"}
KEY_BACK_S = 15.0  # the leases' TTL plus 5 s
HEALED_S = 30.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=5)
    with Cluster(model_dir=folder, memory="32MiB", dtype="float64") as running:
        yield running


async def keys(cluster: Cluster, prefix: str = "") -> list[str]:
    """The keys below `prefix` without process ids."""
    store = Store(cluster.etcd_url)
    await store.connect()
    try:
        listed = await store.list_prefix(prefix)
    finally:
        await store.close()
    return sorted(k.rpartition("/")[0] if k.startswith("services/") else k for k in listed)


async def delete_keys(cluster: Cluster, prefix: str) -> None:
    store = Store(cluster.etcd_url)
    await store.connect()
    listed = await store.list_prefix(prefix)
    assert listed, f"there is nothing below {prefix}"
    same = [SameCreation(key, entry.create_revision) for key, entry in listed.items()]
    assert await store.transact(same, {}, list(listed))
    await store.close()


async def back(cluster: Cluster, expected: list[str]) -> bool:
    return set(await keys(cluster)) >= set(expected) and serves(cluster)


def serves(cluster: Cluster) -> bool:
    """Whether the gateway is ready, and both workers serve in stable groups."""
    try:
        cluster.get("/ready")
        status = cluster.get("/tideserve/v1/status", cluster.admin_url)
    except OSError:
        return False
    groups = [g for g in status["groups"] if not (g["degraded"] or g["changing"])]
    served = {name for group in groups for name in group["members"]}
    return served == {row["id"] for row in status["workers"]} == WORKERS


def change(cluster: Cluster, action: str) -> bool:
    """Merge or split all groups; returns whether it succeeded."""
    request = urllib.request.Request(
        f"{cluster.admin_url}/tideserve/v1/groups/{action}",
        b"",
        {"x-tideserve-admin": "1"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return '"phase":"stable"' in response.read().decode()
    except OSError:
        return False


async def changes(cluster: Cluster, action: str) -> None:
    await eventually(lambda: asyncio.to_thread(change, cluster, action), deadline_s=HEALED_S)


@pytest.mark.parametrize(
    "prefix",
    [
        "workers/worker-0",
        "leaders/memmgr",
        "services/scheduler/",
        "services/memmgr/",
        "services/gateway/",
        "groups/",
        "assignments/",
        "",
    ],
)
async def test_deleted_keys_are_restored(cluster: Cluster, prefix: str) -> None:
    await eventually(lambda: serves(cluster))
    undisturbed = await seeded_completion(cluster.url, OUTPUT_TOKENS)
    before, deleted = cluster.pids(), await keys(cluster, prefix)
    streams = [
        asyncio.create_task(seeded_completion(cluster.url, OUTPUT_TOKENS)) for _ in range(STREAMS)
    ]
    await delete_keys(cluster, prefix)
    await eventually(lambda: back(cluster, deleted), deadline_s=KEY_BACK_S)
    assert await seeded_completion(cluster.url, OUTPUT_TOKENS) == undisturbed
    assert await asyncio.gather(*streams) == [undisturbed] * STREAMS
    await changes(cluster, "merge")
    await changes(cluster, "split")
    assert cluster.pids() == before, "no process was restarted"


def copy_data(cluster: Cluster, target: Path) -> Path:
    """Copy etcd's data while it is suspended."""
    cluster.kill("etcd", signal.SIGSTOP)
    try:
        shutil.copytree(cluster.folder / "cluster" / "etcd", target)
    finally:
        cluster.kill("etcd", signal.SIGCONT)
    return target


def replace_data(cluster: Cluster, data: Path | None) -> None:
    """Kill etcd, which `tideserve up` restarts with a copy's data, or empty."""
    folder = cluster.folder / "cluster" / "etcd"
    os.kill(cluster.up_pid, signal.SIGSTOP)
    try:
        cluster.kill("etcd")
        shutil.rmtree(folder)
        if data is not None:
            shutil.copytree(data, folder)
        else:
            folder.mkdir(mode=0o700)
    finally:
        os.kill(cluster.up_pid, signal.SIGCONT)


@pytest.mark.parametrize("data", ["old", "empty"])
@pytest.mark.parametrize("merged", [False, True])
async def test_etcd_restarts_without_its_latest_writes(
    cluster: Cluster, tmp_path: Path, data: str, merged: bool
) -> None:
    await eventually(lambda: serves(cluster))
    undisturbed = await seeded_completion(cluster.url, OUTPUT_TOKENS)
    copy = copy_data(cluster, tmp_path / "copy")
    await changes(cluster, "merge")
    if not merged:
        await changes(cluster, "split")
    services = {name: pid for name, pid in cluster.pids().items() if name != "etcd"}
    streams = [
        asyncio.create_task(seeded_completion(cluster.url, OUTPUT_TOKENS)) for _ in range(STREAMS)
    ]
    rollbacks = cluster.log("memmgr").count("has lost writes")
    etcd = cluster.pids()["etcd"]
    replace_data(cluster, None if data == "empty" else copy)
    await asyncio.to_thread(cluster.wait_for_restart, "etcd", etcd)
    await eventually(
        lambda: cluster.log("memmgr").count("has lost writes") > rollbacks, deadline_s=HEALED_S
    )
    await eventually(lambda: serves(cluster), deadline_s=HEALED_S)
    assert await seeded_completion(cluster.url, OUTPUT_TOKENS) == undisturbed
    assert await asyncio.gather(*streams) == [undisturbed] * STREAMS
    await changes(cluster, "merge")
    await changes(cluster, "split")
    now = {name: pid for name, pid in cluster.pids().items() if name != "etcd"}
    assert now == services, "no process was restarted"
