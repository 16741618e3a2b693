"""Two gateways share a real PostgreSQL: the leader runs lines, both serve the API."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.common.etcd import Store
from tests.support.batches import CHAT, KILL_POINTS, as_file, chat_lines, check_answers, submit
from tests.support.client import open_client
from tests.support.control_plane import SHORT_LEASE_TTL_S
from tests.support.fake_cluster import FakeCluster, fake_cluster
from tests.support.gateway import endless
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.postgres_server import PostgresServer, postgres_server
from tests.support.waiting import eventually

LINES = chat_lines(24)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture
def postgres(shared_server: PostgresServer) -> PostgresServer:
    shared_server.clear()
    return shared_server


@asynccontextmanager
async def gateway(
    cluster: FakeCluster, postgres: PostgresServer, folder: Path, name: str, **fields: Any
) -> AsyncIterator[GatewayProcess]:
    own = folder / name
    own.mkdir()
    stores = {"batch_store": postgres.url, "batch_files": str(folder / "objects")}
    async with gateway_process(
        cluster, own, lease_ttl_s=SHORT_LEASE_TTL_S, **stores, **fields
    ) as process:
        yield process


@pytest.mark.parametrize("point", KILL_POINTS)
async def test_the_other_gateway_takes_over_from_any_point(
    store: Store, postgres: PostgresServer, tmp_path: Path, point: str
) -> None:
    armed = {"failpoints": [point], "failpoint_file": str(tmp_path / "hits")}
    async with (
        fake_cluster(store, endless, max_model_len=256) as cluster,
        gateway(cluster, postgres, tmp_path, "first", **armed) as first,
        gateway(cluster, postgres, tmp_path, "second") as second,
    ):
        async with open_client(second.url) as client:
            batch = await submit(client, as_file(LINES))
        await eventually(lambda: not first.process.is_running())
        assert (tmp_path / "hits").read_text()
        await check_answers(second.url, batch.id, LINES)


async def test_a_database_outage_pauses_batches_but_not_online_requests(
    store: Store, postgres: PostgresServer, tmp_path: Path
) -> None:
    async with (
        fake_cluster(store, endless, max_model_len=256) as cluster,
        gateway(cluster, postgres, tmp_path, "first") as first,
        open_client(first.url) as client,
        httpx.AsyncClient(base_url=first.url, timeout=60) as http,
    ):
        worker = cluster.workers[0]
        worker.pause_at = 5
        batch = await submit(client, as_file(LINES))
        await eventually(lambda: len(worker.active) >= 16)
        await asyncio.to_thread(postgres.kill)
        try:
            # The running lines end now, and their results wait for the database.
            worker.pause_at = None
            worker.go.set()
            with pytest.raises(openai.InternalServerError) as raised:
                await client.with_options(max_retries=0).batches.retrieve(batch.id)
            assert (
                raised.value.status_code == 503 and "retry-after" in raised.value.response.headers
            )
            online = await http.post(CHAT, json=LINES[0]["body"])
            assert online.status_code == 200
        finally:
            await asyncio.to_thread(postgres.start)
        await check_answers(first.url, batch.id, LINES)
