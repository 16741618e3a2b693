"""Random processes are killed while a batch runs; its output equals an undisturbed run."""

import asyncio
import os
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.support.batches import (
    ENDED,
    as_file,
    chat_line,
    differing,
    ended,
    look,
    results,
    submit,
    watched,
)
from tests.support.client import open_client
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually

VICTIMS = ("gateway", "worker-0", "scheduler", "worker-1", "etcd", "memmgr")
READY_S = 120.0
BATCH_S = 1800.0
LINES = int(os.environ.get("TIDESERVE_BATCH_LINES", "1000"))
TOKENS = int(os.environ.get("TIDESERVE_BATCH_TOKENS", "200"))
KILLS = int(os.environ.get("TIDESERVE_BATCH_KILLS", "20"))
RESUME_S = 15.0


SLOW = {"paced": "A100-14B:8", "gateway": {"batch_window": 64}}
"""Options of a cluster whose batch outlasts the kills."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=4)


def cluster_of(model: Path, **options: Any) -> Cluster:
    return Cluster(model_dir=model, model_name="m", memory="32MiB", dtype="float64", **options)


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Cluster]:
    with cluster_of(model) as running:
        yield running


def lines_of(count: int, tokens: int) -> list[dict[str, Any]]:
    """Greedy lines, and lines with seeded sampling."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 7},
        {"temperature": 0.7, "seed": 8, "frequency_penalty": 0.5},
        {"temperature": 0},
    ]
    return [
        chat_line(number, max_tokens=tokens, ignore_eos=True, **kinds[number % len(kinds)])
        for number in range(count)
    ]


async def completed(client: AsyncOpenAI, batch_id: str) -> list[dict[str, Any]]:
    """The results of a batch, once it has ended."""
    batch = await ended(client, batch_id, BATCH_S)
    assert batch.status == "completed" and batch.error_file_id is None, batch
    return await results(client, batch.output_file_id)


async def run(
    cluster: Cluster,
    lines: list[dict[str, Any]],
    victims: Sequence[str] = (),
    pause_s: float = 0.0,
) -> tuple[list[dict[str, Any]], int]:
    """Run a batch; returns its results, and the number of victims killed before its end."""
    killed: list[str] = []
    async with open_client(cluster.url) as client:
        batch = await submit(client, as_file(lines))
        async with watched(client, batch.id, killed):
            for victim in victims:
                await asyncio.to_thread(wait_until_ready, cluster)
                await asyncio.sleep(pause_s)
                if await over(client, batch.id):
                    break
                pid = cluster.kill(victim)
                killed.append(victim)
                await asyncio.to_thread(cluster.wait_for_restart, victim, pid)
            await asyncio.to_thread(wait_until_ready, cluster)
            return await completed(client, batch.id), len(killed)


async def over(client: AsyncOpenAI, batch_id: str) -> bool:
    batch = await look(client, batch_id)
    return batch is not None and batch.status in ENDED


async def answered(client: AsyncOpenAI, batch_id: str, least: int) -> int | None:
    """The number of finished lines; None while there are fewer than `least`."""
    batch = await look(client, batch_id)
    counts = None if batch is None else batch.request_counts
    return counts.completed if counts is not None and counts.completed >= least else None


async def run_restarted(
    cluster: Cluster, lines: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], float]:
    """Restart during a batch; returns its results, and the seconds from readiness to a result."""
    async with open_client(cluster.url) as client:
        batch = await submit(client, as_file(lines))
        before = await eventually(lambda: answered(client, batch.id, len(lines) // 10))
        await asyncio.to_thread(restart, cluster)
        ready_s = time.monotonic()
        assert not await over(client, batch.id)
        await eventually(lambda: answered(client, batch.id, before + 1))
        resumed_s = time.monotonic() - ready_s
        return await completed(client, batch.id), resumed_s


def restart(cluster: Cluster) -> None:
    """Kill every process, restart the cluster and wait until it is ready."""
    cluster.kill_all()
    cluster.start()
    cluster.wait_until_ready()
    wait_until_ready(cluster)


def wait_until_ready(cluster: Cluster) -> None:
    def ready() -> bool:
        try:
            return httpx.get(f"{cluster.url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    cluster.eventually(ready, READY_S)


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_killed_processes_change_no_line(cluster: Cluster) -> None:
    lines = lines_of(240, 80)
    undisturbed, _ = asyncio.run(run(cluster, lines))
    disturbed, killed = asyncio.run(run(cluster, lines, list(VICTIMS), 1.0))
    assert killed >= 3
    assert not differing(disturbed, undisturbed)
    assert [answer["custom_id"] for answer in disturbed] == [line["custom_id"] for line in lines]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_lines_resume_soon_after_all_processes_restart(cluster: Cluster) -> None:
    lines = lines_of(480, 80)
    undisturbed, _ = asyncio.run(run(cluster, lines))
    restarted, resumed_s = asyncio.run(run_restarted(cluster, lines))
    assert not differing(restarted, undisturbed)
    assert resumed_s <= RESUME_S


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(3600)
def test_a_thousand_lines_survive_twenty_kills(model: Path) -> None:
    lines = lines_of(LINES, TOKENS)
    with cluster_of(model) as fast:
        undisturbed, _ = asyncio.run(run(fast, lines))
    seed = time.time_ns()
    victims = random.Random(seed).choices(VICTIMS, k=KILLS)
    with cluster_of(model, **SLOW) as slow:
        disturbed, killed = asyncio.run(run(slow, lines, victims, 10.0))
    assert killed == len(victims), f"the batch ended early; seed {seed}"
    assert not differing(disturbed, undisturbed), f"seed {seed}"
    assert [answer["custom_id"] for answer in disturbed] == [line["custom_id"] for line in lines]
