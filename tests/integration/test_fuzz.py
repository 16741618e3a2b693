"""Random requests over HTTP and gRPC, with a real engine and the default model."""

import asyncio
from collections.abc import Iterator

import grpc.aio
import httpx
import openai
import pytest

from tests.support.client import open_client
from tests.support.cluster import Cluster
from tests.support.grpc_fuzz import GrpcFuzz
from tests.support.http_fuzz import HttpFuzz
from tests.support.waiting import eventually

MODEL = "SmolLM2-135M-Instruct"
CONTEXT = 256
AT_ONCE = 6
TIMEOUT_S = 300.0
EACH = 100


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(memory="512MiB", dtype="bfloat16", workers=1, max_model_len=CONTEXT) as running:
        yield running


async def answer(client: openai.AsyncOpenAI) -> str | None:
    chat = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
    )
    return chat.choices[0].message.content


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_two_hundred_random_requests_over_http_and_grpc(cluster: Cluster) -> None:
    blocks = cluster.kv_blocks("kv_blocks_total")
    processes = cluster.pids()
    async with (
        open_client(cluster.url, "none") as client,
        httpx.AsyncClient(base_url=cluster.url, timeout=TIMEOUT_S) as http,
        grpc.aio.insecure_channel(cluster.grpc_target) as channel,
    ):
        before = await answer(client)
        over_http = HttpFuzz(http, MODEL, AT_ONCE)
        over_grpc = GrpcFuzz(channel, "none", MODEL, AT_ONCE)
        await asyncio.gather(over_http.run(range(EACH)), over_grpc.run(range(EACH)))
        assert not over_grpc.failures, "\n".join(over_grpc.failures)
        assert over_http.statuses[200] > 20 and over_http.statuses[400] > 20
        assert over_grpc.codes["OK"] > 20 and over_grpc.codes["INVALID_ARGUMENT"] > 20
        await eventually(lambda: cluster.kv_blocks("kv_blocks_free") == blocks)
        assert before and await answer(client) == before
    assert cluster.pids() == processes, "no process was restarted"
    assert "Traceback" not in cluster.log("worker-0") + cluster.log("gateway")
