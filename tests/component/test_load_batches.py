"""The load generator's batches at a real gateway in front of fake services."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.common.etcd import Store
from services.gateway.batches.settings import BatchSettings
from tests.support.fake_openai import fake_openai
from tests.support.gateway import Case, gateway_case
from tests.support.waiting import eventually
from tideserve.load.batch_client import BatchClient, BatchFailed
from tideserve.load.client import Job, LoadClient
from tideserve.load.record import RequestOutcome
from tideserve.load.workload import Backlog, PlannedRequest

LINES = [PlannedRequest(0.0, (97 + number, 98), 4, seed=number) for number in range(20)]


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    settings = BatchSettings(batch_store=f"sqlite:///{tmp_path}/batches.db")
    async with gateway_case(store, tmp_path / "model", batches=settings) as case:
        yield case


async def test_requests_are_the_lines_of_a_batch(case: Case) -> None:
    async with BatchClient(case.url, None, "m") as client:
        await client.run(LINES)
    (batch,) = (await case.openai.batches.list()).data
    assert batch.status == "completed" and batch.request_counts.completed == len(LINES)
    starts = case.cluster.workers[0].starts
    assert {tuple(start.prompt_ids) for start in starts} == {line.prompt_ids for line in LINES}


async def test_a_cancelled_run_cancels_its_batch(case: Case) -> None:
    worker = case.paused(1)
    async with BatchClient(case.url, None, "m") as client:
        running = asyncio.create_task(client.run(LINES))
        await eventually(lambda: len(worker.active) >= 16)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    (batch,) = (await case.openai.batches.list()).data
    assert batch.status == "cancelled"


async def test_an_incomplete_batch_is_a_failure(case: Case) -> None:
    too_long = PlannedRequest(0.0, (97, 98), 100_000, seed=1)
    async with BatchClient(case.url, None, "m") as client:
        with pytest.raises(BatchFailed, match="is completed; 20 of 21 lines have an answer"):
            await client.run([*LINES, too_long])


async def test_a_refused_batch_is_recorded_as_a_failure() -> None:
    online = PlannedRequest(0.0, (1, 301), 3, seed=1)
    backlog = Backlog(1, (4, 9), (2, 5), seed=1, lines=20)
    with fake_openai({1: "silent"}) as server:
        job = Job((server.url,), "fake", (online,), timeout_s=60.0, backlog=backlog)
        client = LoadClient(job)
        running = asyncio.create_task(client.run())
        await eventually(lambda: client.records)
        server.ending.set()
        await running
    *batches, answered = client.records
    assert answered.outcome is RequestOutcome.COMPLETED
    assert {(each.slo_class, each.outcome) for each in batches} == {
        ("batch", RequestOutcome.FAILED)
    }
    assert "HTTP 501" in batches[0].error
