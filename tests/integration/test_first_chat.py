"""What a newcomer does first, with the real default model."""

import json
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster import Cluster

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
    command = [sys.executable, "-m", "cli.main", "status", "--json", "--url", cluster.url]
    status = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    names = {row["name"] for row in status["services"]}
    assert names == {"gateway", "scheduler", "memmgr", "worker-0", "worker-1"}
    assert all(row["ready"] and row["rss_bytes"] > 0 for row in status["services"])
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
        [sys.executable, "-m", "cli.main", "status", "--url", cluster.url],
        capture_output=True,
        check=True,
        timeout=60,
        text=True,
    ).stdout
    assert all(name in table for name in names)
