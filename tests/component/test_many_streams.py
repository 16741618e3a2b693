"""Two thousand streams through a gateway process, also with stalled readers.

The gateway and the readers are separate processes; its backends are faked in this process.
"""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import orjson
import pytest

from benchmarks.client_process import run_job
from services.common.clock import monotonic_s
from services.common.etcd import Store
from tests.support.fake_cluster import fake_cluster
from tests.support.gateway import TEXT, text_ids
from tests.support.gateway_process import gateway_process
from tests.support.waiting import eventually
from tideserve.load.client import Job
from tideserve.load.record import RequestOutcome, SentRequest
from tideserve.load.workload import PlannedRequest

STREAMS = 2000
OUTPUT_TOKENS = 32
STEP_S, STEP_TOKENS = 2.0, 4
"""Tokens per stream and its duration in seconds: 4,000 tokens per second in total.

The fakes send a frame per token, whereas an engine sends a frame per step; higher rates would
measure the fakes, not the gateway.
"""
SPREAD_S = 0.002
"""Interval between arrivals, because the listen backlog is limited."""
DEAF, DEAF_TOKENS = 20, 30_000
STALL_S = 4.0
LIVE_S = 1.0
"""Limit of the probes' P99."""
RSS_GROWTH = 1.10
WAVE_LIMIT_S = 120.0
ENOUGH = text_ids(TEXT) * 600
FILES = 3 * STREAMS


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise the limit of open files to fit both ends of every stream."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < FILES:
        pytest.skip(f"this machine allows {hard} open files a process; {FILES} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def wave(url: str) -> tuple[SentRequest, ...]:
    """Run all streams concurrently to their ends, read by another process."""
    requests = tuple(
        PlannedRequest(number * SPREAD_S, (1, 2), OUTPUT_TOKENS, number)
        for number in range(STREAMS)
    )
    return await asyncio.to_thread(
        run_job, Job((url,), "m", requests, WAVE_LIMIT_S), lambda line: None
    )


@asynccontextmanager
async def probed(url: str) -> AsyncIterator[list[float]]:
    """Durations of `/live`, ten times a second, each on a new connection."""
    took: list[float] = []

    async def probe() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
            while True:
                began_s = monotonic_s()
                assert (await client.get("/live")).status_code == 200
                took.append(monotonic_s() - began_s)
                await asyncio.sleep(0.1)

    task = asyncio.create_task(probe())
    try:
        yield took
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def deaf(url: str) -> list[socket.socket]:
    """Clients that request a stream larger than all buffers and read nothing."""
    host, port = url.removeprefix("http://").split(":")
    body = orjson.dumps({"model": "m", "prompt": "hi", "max_tokens": DEAF_TOKENS, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    clients = []
    for _ in range(DEAF):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        clients.append(client)
    return clients


def check(records: Sequence[SentRequest], took: list[float]) -> None:
    """Check that streams are complete and probes are in time."""
    failed = [record.error for record in records if record.outcome is not RequestOutcome.COMPLETED]
    assert (len(failed), len(records)) == (0, STREAMS), failed[:3]
    assert {record.output_tokens for record in records} == {OUTPUT_TOKENS}
    ordered = sorted(took)
    assert len(ordered) >= 10
    assert ordered[int(0.99 * (len(ordered) - 1))] <= LIVE_S


def script(prompt_ids: Sequence[int]) -> list[int]:
    """Endless output tokens."""
    return ENOUGH


@pytest.mark.slow
async def test_no_stream_fails_memory_is_flat_and_probes_are_answered(
    store: Store, tmp_path: Path, many_files: None
) -> None:
    async with fake_cluster(store, script, 2) as cluster:
        for worker in cluster.workers:
            worker.step_s, worker.tokens_per_event = STEP_S, STEP_TOKENS
        async with gateway_process(cluster, tmp_path, client_stall_s=STALL_S) as gateway:
            url, process = gateway.url, gateway.process
            sizes = []
            for _ in range(3):
                async with probed(url) as took:
                    check(await wave(url), took)
                sizes.append(process.memory_info().rss)
            cpu = process.cpu_times()
            tokens = 3 * STREAMS * OUTPUT_TOKENS
            print(
                f"{(cpu.user + cpu.system) / tokens * 1e6:.0f} us of the gateway a token,"
                f" {[size >> 20 for size in sizes]} MiB after each wave,"
                f" /live at most {max(took):.3f} s in the last"
            )
            assert sizes[-1] <= RSS_GROWTH * sizes[0]
            assert all(not worker.active for worker in cluster.workers)


@pytest.mark.slow
async def test_stalled_readers_are_disconnected_without_affecting_others(
    store: Store, tmp_path: Path, many_files: None
) -> None:
    async with fake_cluster(store, script, 2, max_model_len=2 * DEAF_TOKENS) as cluster:
        for worker in cluster.workers:
            worker.step_s, worker.tokens_per_event = 0.05, 64
        async with gateway_process(cluster, tmp_path, client_stall_s=STALL_S) as gateway:
            url = gateway.url
            clients = await asyncio.to_thread(deaf, url)
            try:
                await eventually(lambda: sum(len(w.starts) for w in cluster.workers) == DEAF)
                for worker in cluster.workers:
                    worker.step_s, worker.tokens_per_event = STEP_S, STEP_TOKENS
                async with probed(url) as took:
                    check(await wave(url), took)
                await eventually(lambda: sum(len(w.aborted) for w in cluster.workers) == DEAF)
                assert all(not worker.active for worker in cluster.workers)
            finally:
                for client in clients:
                    client.close()
