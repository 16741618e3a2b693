"""Clients' strings appear in no log of a real cluster at level debug, and in no span or metric."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from tests.support.canaries import MARK, good, refused, word
from tests.support.cluster import Cluster
from tests.support.grpc_bodies import to_message
from tests.support.otlp_receiver import OtlpReceiver
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.cluster]
TIMEOUT_S = 120
KEY = word("key-of-the-cluster-in-32-letters")
ID = "logged-on-purpose"
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"
HEADERS = {"authorization": f"Bearer {KEY}", "x-request-id": ID, "traceparent": TRACEPARENT}
PATHS = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Iterator[Cluster]:
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model"), seed=3, layers=2)
    environment = {
        "TIDESERVE__LOG_LEVEL": "debug",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
    }
    options: dict[str, Any] = {
        "api_key": KEY,
        "model_name": "m",
        "environment": environment,
        # A longer body is refused.
        "worker": {"max_model_len": 1024},
    }
    with Cluster(model_dir=folder, workers=2, memory="64MiB", **options) as running:
        yield running


async def over_http(cluster: Cluster, endpoint: str, body: dict[str, Any]) -> int:
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=HEADERS) as http:
        answer = await http.post(f"{cluster.url}{PATHS[endpoint]}", json=body)
    return answer.status_code


async def over_grpc(cluster: Cluster, endpoint: str, body: dict[str, Any]) -> str:
    request = to_message(endpoint, body)
    async with grpc.aio.insecure_channel(cluster.grpc_target) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        method = stub.Chat if isinstance(request, pb.ChatRequest) else stub.Complete
        call = method(request, metadata=tuple(HEADERS.items()), timeout=TIMEOUT_S)
        return str((await call.code()).name)


async def test_no_service_exposes_strings_of_clients(
    cluster: Cluster, receiver: OtlpReceiver
) -> None:
    for endpoint, body in good():
        assert await over_http(cluster, endpoint, body) == 200, body
        assert await over_grpc(cluster, endpoint, body) == "OK", body
    for endpoint, body in refused():
        assert 400 <= await over_http(cluster, endpoint, body) < 500, body
        assert await over_grpc(cluster, endpoint, body) in ("INVALID_ARGUMENT", "NOT_FOUND")
    # And a request whose client disconnects.
    async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=HEADERS) as http:
        endless = {"model": "m", "prompt": word("prompt"), "stream": True, "ignore_eos": True}
        path = f"{cluster.url}/v1/completions"
        async with http.stream("POST", path, json=endless | {"max_tokens": 200}) as answer:
            await anext(answer.aiter_lines())
        metrics = (await http.get(f"{cluster.url}/metrics")).text
    await eventually(lambda: "decode" in receiver.trace("1" * 32))
    logs = {name: cluster.log(name) for name in cluster.pids()}
    assert {"gateway", "scheduler", "memmgr", "worker-0", "worker-1"} <= logs.keys()
    assert ID in logs["gateway"]
    sources = logs | {
        "output": cluster.output(),
        "metrics": metrics,
        "spans": "\n".join(map(str, receiver.all_spans)),
        "status": json.dumps(cluster.status()),
    }
    for where, text in sources.items():
        for line in text.lower().splitlines():
            assert MARK not in line, f"{where}: {line[:600]}"
