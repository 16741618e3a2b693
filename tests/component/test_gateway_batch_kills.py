"""Gateways killed or suspended while they run batches: each line has a single result."""

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import AsyncOpenAI

from services.common.clock import monotonic_s
from services.common.etcd import Store
from tests.support.batches import KILL_POINTS, as_file, chat_lines, check_answers, submit
from tests.support.client import open_client
from tests.support.control_plane import SHORT_LEASE_TTL_S
from tests.support.fake_cluster import FakeCluster, fake_cluster
from tests.support.gateway import endless
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.waiting import eventually

LINES = chat_lines(24)
STOPPED = re.compile("another gateway leads|does not lead")
"""The log line of a gateway that no longer leads."""


@asynccontextmanager
async def gateway(
    cluster: FakeCluster, folder: Path, name: str, **fields: Any
) -> AsyncIterator[GatewayProcess]:
    """A gateway process; all share a batch store."""
    own = folder / name
    own.mkdir()
    async with gateway_process(
        cluster,
        own,
        batch_store=f"sqlite:///{folder}/batches.db",
        lease_ttl_s=SHORT_LEASE_TTL_S,
        **fields,
    ) as process:
        yield process


async def suspend(process: psutil.Process, database: Path) -> None:
    """Suspend a gateway between transactions, in which it would hold SQLite's lock."""
    while True:
        process.suspend()
        await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
        try:
            with closing(sqlite3.connect(database, timeout=0.0)) as connection:
                connection.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError:
            process.resume()
            await asyncio.sleep(0.05)


async def output_of(client: AsyncOpenAI, batch_id: str) -> bytes:
    batch = await client.batches.retrieve(batch_id)
    assert batch.output_file_id is not None
    return (await client.files.content(batch.output_file_id)).content


@pytest.mark.parametrize("point", KILL_POINTS)
async def test_a_killed_gateway_loses_no_line(store: Store, tmp_path: Path, point: str) -> None:
    async with fake_cluster(store, endless, max_model_len=256) as cluster:
        hits = tmp_path / "hits"
        armed = {"failpoints": [point], "failpoint_file": str(hits)}
        async with gateway(cluster, tmp_path, "first", **armed) as first:
            async with open_client(first.url) as client:
                batch = await submit(client, as_file(LINES))
            await eventually(lambda: not first.process.is_running())
        assert hits.read_text()
        async with gateway(cluster, tmp_path, "second") as second:
            await check_answers(second.url, batch.id, LINES)


# The shorter suspension ends when the second gateway has finished the batch.
@pytest.mark.parametrize("suspended_s", [0.0, pytest.param(60.0, marks=pytest.mark.slow)])
async def test_a_suspended_leader_that_continues_changes_nothing(
    store: Store, tmp_path: Path, suspended_s: float
) -> None:
    async with fake_cluster(store, endless, max_model_len=256) as cluster:
        worker = cluster.workers[0]
        worker.pause_at = 5
        async with gateway(cluster, tmp_path, "first", log_level="info") as first:
            async with open_client(first.url) as client:
                batch = await submit(client, as_file(LINES))
            await eventually(lambda: len(worker.active) >= 16)
            await suspend(first.process, tmp_path / "batches.db")
            suspended_at_s = monotonic_s()
            started = len(worker.starts)
            try:
                async with gateway(cluster, tmp_path, "second") as second:
                    # The second leads once the lease of the first has expired.
                    await eventually(lambda: len(worker.starts) > started)
                    worker.pause_at = None
                    worker.go.set()
                    await check_answers(second.url, batch.id, LINES)
                    async with open_client(second.url) as client:
                        output = await output_of(client, batch.id)
                        await asyncio.sleep(suspended_at_s + suspended_s - monotonic_s())
                        first.process.resume()
                        await check_answers(first.url, batch.id, LINES)
                        # It learns of the other leader from the store, or from etcd.
                        await eventually(lambda: STOPPED.search(first.log.read_text()))
                        assert await output_of(client, batch.id) == output
            finally:
                first.process.resume()
