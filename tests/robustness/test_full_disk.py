"""A full disk of the cluster's folder: `up` survives, streams complete, and all recovers.

`test_up.py` tests `up` alone, without a separate file system.
"""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import URLError

import pytest

from services.common.etcd_connection import CALL_TIMEOUT_S
from tests.support.client import Answer, numbered_completion
from tests.support.cluster import REPOSITORY, Cluster
from tests.support.full_disk import SmallDisk, small_disk
from tests.support.tiny_models import make_tiny_model
from tideserve.cli.errors import CommandError
from tideserve.cli.groups import drop, restore

STREAMS = 8
OUTPUT_TOKENS = 400
HEAL_S = 120.0
"""Recovery deadline: etcd restarts within 15 s of free space, and `up` writes within 10 s."""

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, SmallDisk]]:
    """A cluster with its folder on a small disk, but not the model and the output of `up`."""
    cluster = Cluster(
        model_dir=make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4),
        memory="32MiB",
        dtype="float64",
        chunk_size="64KiB",
        overload_policy="recompute",  # no automatic changes of groups
    )
    try:
        with small_disk(cluster.folder / "cluster") as disk, cluster:
            yield cluster, disk
    finally:
        shutil.rmtree(cluster.folder)


async def streams(cluster: Cluster, begun: asyncio.Barrier | None = None) -> list[Answer]:
    async def ask(number: int) -> Answer:
        async def wait_for_all(chunks: int) -> None:
            if chunks == 1 and begun is not None:
                await begun.wait()

        options = {"prompt_tokens": 24, "max_tokens": OUTPUT_TOKENS, "on_chunk": wait_for_all}
        return await numbered_completion(cluster.url, number, **options)

    return await asyncio.gather(*(ask(number) for number in range(STREAMS)))


@pytest.fixture(scope="module")
def undisturbed(small: tuple[Cluster, SmallDisk]) -> list[Answer]:
    return asyncio.run(streams(small[0]))


def disturbed(cluster: Cluster, disturb: Callable[[], None]) -> list[Answer]:
    """The outputs of streams that have all started when `disturb` is called."""

    async def run() -> list[Answer]:
        begun = asyncio.Barrier(STREAMS + 1)
        answers = asyncio.create_task(streams(cluster, begun))
        await begun.wait()
        await asyncio.to_thread(disturb)
        return await answers

    return asyncio.run(run())


def write_to_etcd(cluster: Cluster) -> None:
    """Write until etcd has exited for lack of space."""
    deaths = cluster.output().count("etcd died")
    value = base64.b64encode(bytes(20_000)).decode()
    for number in range(3000):
        key = base64.b64encode(f"/other/{number % 50}".encode()).decode()
        body = json.dumps({"key": key, "value": value}).encode()
        request = urllib.request.Request(f"{cluster.etcd_url}/v3/kv/put", body)
        try:
            urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S).close()
        except (URLError, OSError):
            break
    cluster.eventually(lambda: cluster.output().count("etcd died") > deaths)


def registered_pids(cluster: Cluster) -> dict[str, int]:
    """Ids of the registered processes and of etcd."""
    pids = {row["name"]: row["pid"] for row in cluster.status()["services"]}
    return pids | {"etcd": cluster.pids().get("etcd", 0)}


def status_text(cluster: Cluster) -> str:
    """The output of `tideserve status`."""
    command = [sys.executable, "-m", "tideserve.cli.commands.main", "status", "--cluster-dir"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    return subprocess.run(
        [*command, str(cluster.folder / "cluster")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    ).stdout


def check_healed(cluster: Cluster) -> None:
    """Check that all processes run and are registered, and that groups can change."""
    warnings = cluster.output().count("cannot write cluster.json")
    cluster.eventually(lambda: cluster.output().count("can be written again") == warnings, HEAL_S)
    cluster.eventually(
        lambda: len(cluster.pids()) == 6 and all(map(process_lives, cluster.pids().values())),
        HEAL_S,
    )
    # The record of a killed worker, and its group, stay until its lease expires.
    cluster.eventually(lambda: registered_pids(cluster) == cluster.pids(), HEAL_S)
    cluster.eventually(lambda: cluster.metric("tideserve_gateway_groups_serving") == 2, HEAL_S)
    assert "is full" not in status_text(cluster)
    # While groups are re-formed, a change may fail.
    cluster.eventually(lambda: changes(cluster), HEAL_S)
    assert len(cluster.status()["groups"]) == 2


def changes(cluster: Cluster) -> bool:
    """Whether groups can be merged and split."""
    try:
        drop(cluster.admin_url, None, [])
        restore(cluster.admin_url, None, None)
    except CommandError:
        return False
    return True


def process_lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_worker_that_dies_on_a_full_disk_restarts(
    small: tuple[Cluster, SmallDisk], undisturbed: list[Answer]
) -> None:
    cluster, disk = small
    old_pid = cluster.pids()["worker-0"]

    def disturb() -> None:
        disk.fill()
        cluster.kill("worker-0")
        cluster.eventually(lambda: "worker-0 was restarted" in cluster.output())

    try:
        answers = disturbed(cluster, disturb)
        assert "is full" in status_text(cluster)
    finally:
        disk.free()
    assert [answer.text for answer in answers] == [answer.text for answer in undisturbed]
    assert cluster.running
    cluster.eventually(lambda: cluster.pids().get("worker-0", old_pid) != old_pid, HEAL_S)
    check_healed(cluster)


def test_an_etcd_that_cannot_write_is_restarted_until_it_can(
    small: tuple[Cluster, SmallDisk], undisturbed: list[Answer]
) -> None:
    cluster, disk = small

    def disturb() -> None:
        disk.fill()
        write_to_etcd(cluster)

    try:
        answers = disturbed(cluster, disturb)
        later = asyncio.run(streams(cluster))
        assert "is full" in status_text(cluster)
        cluster.eventually(lambda: cluster.metric("tideserve_etcd_call_failures_total") > 0)
    finally:
        disk.free()
    for texts in (answers, later):
        assert [answer.text for answer in texts] == [answer.text for answer in undisturbed]
    assert cluster.running
    check_healed(cluster)
