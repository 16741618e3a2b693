"""Tokens keep flowing without a control plane, and new requests succeed once it restarts."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from services.common.etcd import Store
from tests.support.client import seeded_completion
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually

OUTPUT_TOKENS = 400
LEASE_S = 10
WORKERS = {"worker-0", "worker-1"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), seed=5)
    with Cluster(model_dir=folder, memory="32MiB", dtype="float64") as running:
        yield running


def model_name(cluster: Cluster) -> str:
    return cluster.get("/v1/models")["data"][0]["id"]


def busy_worker(cluster: Cluster) -> str | None:
    busy = [row["id"] for row in cluster.status()["workers"] if row["running"]]
    return busy[0] if busy else None


def is_whole(cluster: Cluster) -> bool:
    """Whether requests are accepted, and both workers serve in live processes."""
    try:
        status = cluster.status()
        taken = cluster.get("/ready") is not None
    except OSError:
        return False
    living = all(
        row["pids"] and all(map(psutil.pid_exists, row["pids"])) for row in status["workers"]
    )
    served = {name for group in status["groups"] for name in group["members"]}
    return taken and living and served == {row["id"] for row in status["workers"]} == WORKERS


async def etcd_get(cluster: Cluster, key: str) -> bytes | None:
    store = Store(cluster.etcd_url)
    await store.connect()
    try:
        entry = (await store.list_prefix(key)).get(key)
        return entry.value if entry is not None else None
    finally:
        await store.close()


class Trigger:
    """Runs an action in the middle of a stream, and pauses the stream's reader meanwhile."""

    def __init__(self, action) -> None:
        self._action = action
        self.fired = False

    async def __call__(self, chunks: int) -> None:
        if chunks == 5 and not self.fired:
            self.fired = True
            await asyncio.to_thread(self._action)


async def succeeds(cluster: Cluster) -> bool:
    try:
        return (await seeded_completion(cluster.url, 4)).completion_tokens == 4
    except Exception:  # noqa: BLE001 - whatever the client raises means: not yet
        return False


@pytest.mark.parametrize("service", ["scheduler", "memmgr"])
async def test_a_stream_completes_despite_a_killed_control_service(
    cluster: Cluster, service: str
) -> None:
    undisturbed = await seeded_completion(cluster.url, OUTPUT_TOKENS)
    before = cluster.pids()[service]
    trigger = Trigger(lambda: cluster.kill(service, signal.SIGKILL))
    disturbed = await seeded_completion(cluster.url, OUTPUT_TOKENS, on_chunk=trigger)
    assert trigger.fired
    assert disturbed == undisturbed
    assert disturbed.completion_tokens == OUTPUT_TOKENS
    await eventually(lambda: succeeds(cluster))
    await eventually(lambda: cluster.pids().get(service) not in (None, before))
    assert await seeded_completion(cluster.url, OUTPUT_TOKENS) == undisturbed


async def test_without_a_scheduler_a_request_gets_503_within_seconds(cluster: Cluster) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "model": model_name(cluster)}
    cluster.kill("scheduler", signal.SIGSTOP)
    try:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        async with httpx.AsyncClient(timeout=30) as client:
            response = await client.post(f"{cluster.url}/v1/completions", json=body)
        assert response.status_code == 503, response.text
        assert int(response.headers["retry-after"]) >= 1
        assert "scheduler" in response.json()["error"]["message"]
        assert loop.time() - started_s < 15
    finally:
        cluster.kill("scheduler", signal.SIGCONT)
    await eventually(lambda: succeeds(cluster))


async def test_a_killed_worker_is_removed_and_returns(cluster: Cluster) -> None:
    victim = "worker-0"
    # A restarted memory manager may not have read the groups yet.
    await eventually(lambda: len(cluster.status()["groups"]) == 2)
    before = {group["id"]: group["epoch"] for group in cluster.status()["groups"]}
    pids = next(row["pids"] for row in cluster.workers() if row["id"] == victim)
    record = await etcd_get(cluster, f"workers/{victim}")
    cluster.kill(victim, signal.SIGKILL)

    async def record_gone() -> bool:
        return await etcd_get(cluster, f"workers/{victim}") != record

    loop = asyncio.get_running_loop()
    killed_s = loop.time()

    def has_left() -> bool:
        """Whether the killed process's row and group are gone, ignoring its successor's."""
        status = cluster.status()
        rows = [row for row in status["workers"] if row["pids"] == pids]
        groups = [group for group in status["groups"] if group["id"] == f"group-{victim}"]
        return not rows and all(group["epoch"] > before[group["id"]] for group in groups)

    await eventually(record_gone)
    await eventually(has_left)
    assert loop.time() - killed_s < LEASE_S + 20
    assert await succeeds(cluster), "the other worker goes on"

    await eventually(lambda: is_whole(cluster))
    after = {group["id"]: group["epoch"] for group in cluster.status()["groups"]}
    assert set(after) == set(before)
    assert after[f"group-{victim}"] > before[f"group-{victim}"]
    assert after["group-worker-1"] == before["group-worker-1"]

    def holds_nothing() -> bool:
        """Whether its last report shows no request, even if the successor served it."""
        row = next(row for row in cluster.status()["workers"] if row["id"] == victim)
        return bool(row["kv_blocks_free"] == row["kv_blocks_total"] > 0)

    await eventually(holds_nothing)


async def test_a_killed_engine_removes_its_worker_at_once(cluster: Cluster) -> None:
    await eventually(lambda: is_whole(cluster))
    row = next(row for row in cluster.workers() if row["id"] == "worker-1")
    servicer, engine = row["pids"]
    epochs = {group["id"]: group["epoch"] for group in cluster.status()["groups"]}
    os.kill(engine, signal.SIGKILL)
    await eventually(lambda: cluster.pids().get("worker-1", servicer) != servicer)
    assert await succeeds(cluster), "the other worker goes on"
    await eventually(lambda: is_whole(cluster))
    assert "the engine process ended with code -9" in cluster.output()
    after = {group["id"]: group["epoch"] for group in cluster.status()["groups"]}
    assert after["group-worker-1"] > epochs["group-worker-1"]


async def test_a_stream_of_a_killed_worker_continues_at_the_other(cluster: Cluster) -> None:
    await eventually(lambda: is_whole(cluster))
    body = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    lines: list[str] = []
    before = {row["id"]: row["pids"] for row in cluster.workers()}
    victims: list[str] = []
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream(
            "POST", f"{cluster.url}/v1/completions", json={**body, "model": model_name(cluster)}
        ) as response,
    ):
        async for line in response.aiter_lines():
            lines.append(line)
            if len(lines) == 10:
                victims.append(await eventually(lambda: busy_worker(cluster)))
                cluster.kill(victims[0], signal.SIGKILL)
    assert [line for line in lines if line][-1] == "data: [DONE]"
    assert not any('"error"' in line for line in lines)

    (victim,) = victims

    def is_back() -> bool:
        status = cluster.status()
        now = {row["id"]: row["pids"] for row in status["workers"]}
        return now.get(victim, before[victim]) != before[victim] and len(status["groups"]) == 2

    await eventually(is_back, deadline_s=120)
    await eventually(lambda: is_whole(cluster))


async def test_an_outage_of_etcd_for_ten_seconds(cluster: Cluster) -> None:
    await eventually(lambda: is_whole(cluster))
    undisturbed = await seeded_completion(cluster.url, OUTPUT_TOKENS)
    pids = cluster.pids()

    async def outage() -> None:
        cluster.kill("etcd", signal.SIGSTOP)
        await asyncio.sleep(10)  # the fault itself, not a wait for an effect
        cluster.kill("etcd", signal.SIGCONT)

    away = asyncio.create_task(outage())
    streams = await asyncio.gather(
        *(seeded_completion(cluster.url, OUTPUT_TOKENS) for _ in range(4))
    )
    assert all(answer == undisturbed for answer in streams)
    await away
    await eventually(lambda: succeeds(cluster))
    await eventually(lambda: is_whole(cluster))
    assert cluster.pids() == pids, "no process was restarted"


async def test_etcd_killed_and_restarted(cluster: Cluster) -> None:
    undisturbed = await seeded_completion(cluster.url, OUTPUT_TOKENS)
    groups = {group["id"]: group["epoch"] for group in cluster.status()["groups"]}
    trigger = Trigger(lambda: cluster.kill("etcd", signal.SIGKILL))
    assert await seeded_completion(cluster.url, OUTPUT_TOKENS, on_chunk=trigger) == undisturbed
    await eventually(lambda: succeeds(cluster))
    await eventually(lambda: is_whole(cluster))
    after = {group["id"]: group["epoch"] for group in cluster.status()["groups"]}
    assert all(after[name] >= epoch for name, epoch in groups.items())
