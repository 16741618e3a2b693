"""The first steps of a new user, with the real default model."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cluster import Cluster
from tests.support.waiting import eventually

QUESTION = {
    "model": "SmolLM2-135M-Instruct",
    "temperature": 0,
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(memory="512MiB", dtype="bfloat16") as running:
        yield running


def test_the_capital_of_france(cluster: Cluster) -> None:
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=QUESTION, timeout=120).json()
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text

    deltas = []
    body = {**QUESTION, "stream": True}
    with httpx.stream(
        "POST", f"{cluster.url}/v1/chat/completions", json=body, timeout=120
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line.removeprefix("data: "))
        deltas.append(chunk["choices"][0]["delta"].get("content") or "")
    assert "".join(deltas) == text


def test_status_shows_services_and_memory(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "tideserve.cli.commands.main", "status", "--json"]
    command += ["--cluster-dir", str(cluster.folder / "cluster")]

    def whole() -> dict[str, Any] | None:
        """The status, if all services answered within its short deadlines."""
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        status: dict[str, Any] = json.loads(done.stdout)
        all_told = all(row["rss_bytes"] for row in status["services"])
        return status if all_told and "errors" not in status else None

    status = cluster.eventually(whole)
    names = {row["name"] for row in status["services"]}
    assert names == {"gateway", "scheduler", "memmgr", "worker-0", "worker-1"}
    assert all(row["ready"] and row["rss_bytes"] > 0 for row in status["services"])
    assert [worker["id"] for worker in status["workers"]] == ["worker-0", "worker-1"]
    for worker in status["workers"]:
        assert len(worker["pids"]) == 2
        assert worker["parameter_bytes"] >= 269_000_000
        assert 0 < worker["kv_blocks_free"] <= worker["kv_blocks_total"]
        assert {"running", "waiting", "preemptions_total"} <= set(worker)
    assert [(g["id"], g["members"]) for g in status["groups"]] == [
        ("group-worker-0", ["worker-0"]),
        ("group-worker-1", ["worker-1"]),
    ]
    table = subprocess.run(
        [*command[:4], "--admin-url", cluster.admin_url],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    ).stdout
    assert all(name in table for name in names)


def test_services_stay_within_their_memory_limits(cluster: Cluster) -> None:
    cluster.check_memory(budget_bytes=512 * 2**20)


def test_only_one_port_is_fixed_and_all_are_on_loopback(cluster: Cluster) -> None:
    listening = [
        connection.laddr
        for pid in cluster.processes()
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    assert cluster.port in {address.port for address in listening}


async def test_a_disconnect_during_a_long_prefill(cluster: Cluster) -> None:
    """An iteration over a long context takes more than a second, but an abort is not delayed."""
    long = {**QUESTION, "messages": [{"role": "user", "content": "tide and time " * 1500}]}
    free = cluster.kv_blocks("kv_blocks_free")
    async with httpx.AsyncClient(timeout=120) as client:
        asking = asyncio.create_task(client.post(f"{cluster.url}/v1/chat/completions", json=long))
        await eventually(lambda: cluster.kv_blocks("kv_blocks_free") < free)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    loop = asyncio.get_running_loop()
    gone_s = loop.time()
    await eventually(lambda: cluster.kv_blocks("kv_blocks_free") == free)
    # A second on an idle machine; the rest is slack for busy machines.
    assert loop.time() - gone_s < 15
