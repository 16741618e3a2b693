"""Security-relevant headers sent as trailers, twice, or under another spelling."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
import pytest

from services.common.etcd import Store
from services.gateway.serving.single_headers import SINGLE_HEADERS
from tests.support.gateway import TIMEOUT_S, Case, gateway_case
from tideserve.gateway.v1 import gateway_pb2, gateway_pb2_grpc

KEY = "k" * 20
BODY = {"model": "m", "prompt": "hi", "max_tokens": 2}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize"]
Headers = list[tuple[str, str]]


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model", api_key=KEY) as case:
        yield case


def keyed(*headers: tuple[str, str]) -> Headers:
    return [("authorization", f"Bearer {KEY}"), *headers]


ALWAYS = [
    *(("host", "gateway"), ("content-type", "application/json")),
    *(("transfer-encoding", "chunked"), ("connection", "close")),
]


def lines(headers: Headers) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers) + "\r\n"


async def send(
    case: Case,
    headers: Headers,
    path: str = PATHS[0],
    trailers: Headers | None = None,
    apart: bool = False,
) -> tuple[int, httpx.Headers, str]:
    """Send a chunked request; `apart`: trailers are sent after the rest was read."""
    body = json.dumps(BODY)
    head = f"POST {path} HTTP/1.1\r\n{lines(ALWAYS + headers)}"
    parts = [f"{head}{len(body):x}\r\n{body}\r\n0\r\n", lines(trailers or [])]
    place = urlsplit(case.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        for part in parts if apart else ["".join(parts)]:
            writer.write(part.encode())
            await writer.drain()
            # Once this is answered, the gateway has read the part.
            await case.http.get("/live")
        async with asyncio.timeout(TIMEOUT_S):
            head, _, text = (await reader.read()).decode().partition("\r\n\r\n")
    finally:
        writer.close()
    first, *rest = head.split("\r\n")
    pairs = [line.partition(": ") for line in rest]
    received = httpx.Headers([(name, value) for name, _, value in pairs])
    return int(first.split()[1]), received, text


@pytest.mark.parametrize("apart", [False, True], ids=["at once", "later"])
async def test_trailers_are_not_headers(case: Case, apart: bool) -> None:
    async def trailed(headers: Headers, *trailers: tuple[str, str]) -> tuple[int, httpx.Headers]:
        status, received, _ = await send(case, headers, trailers=list(trailers), apart=apart)
        return status, received

    assert (await trailed([], keyed()[0]))[0] == 401
    status, headers = await trailed(keyed(("x-request-id", "mine")), ("x-request-id", "other"))
    assert (status, headers["x-request-id"]) == (200, "mine")
    refused_values = (
        *(("authorization", "Bearer wrong"), ("x-slo-ttft-ms", "soon")),
        *(("x-gateway-inference-objective", "none"), ("content-encoding", "gzip")),
    )
    for refused in refused_values:
        assert (await trailed(keyed(), refused))[0] == 200, refused
    answers = [await trailed(keyed(), ("idempotency-key", "again")) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200]
    assert not any("idempotent-replayed" in headers for _, headers in answers)


@pytest.mark.parametrize("path", PATHS)
async def test_repeated_security_headers_are_refused(case: Case, path: str) -> None:
    sent = dict(ALWAYS + keyed())
    for name in sorted(SINGLE_HEADERS):
        more = (name, sent.get(name, "1"))
        headers = keyed(more) if name in sent else keyed(more, more)
        status, _, text = await send(case, headers, path)
        assert status == 400 and f"'{name}' is repeated" in text
    assert not case.cluster.workers[0].starts


async def test_the_admin_port_refuses_repeated_headers(case: Case) -> None:
    twice = [("x-tideserve-admin", "1"), ("x-tideserve-admin", "1")]
    answer = await case.admin.get("/tideserve/v1/status", headers=twice)
    assert answer.status_code == 400 and "is repeated" in answer.text


async def test_repeated_security_metadata_is_refused(case: Case) -> None:
    request = gateway_pb2.CompleteRequest(model="m", prompts=[gateway_pb2.Prompt(text="hi")])
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        for name in SINGLE_HEADERS - {"host", "content-type"}:
            twice = [("authorization", f"Bearer {KEY}"), (name, "1"), (name, "1")]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Complete(request, metadata=tuple(twice), timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert f"'{name}' is repeated" in (caught.value.details() or "")
    assert not case.cluster.workers[0].starts


async def test_names_with_underscores_and_two_kinds_of_keys(case: Case) -> None:
    async def status(*headers: tuple[str, str]) -> int:
        bare = httpx.AsyncClient(base_url=case.url, timeout=TIMEOUT_S)
        async with bare:
            return (await bare.post("/v1/completions", json=BODY, headers=headers)).status_code

    assert await status(("x-api-key", KEY)) == 200
    assert await status(("x_api_key", KEY)) == 401
    # `authorization` takes precedence.
    assert await status(("authorization", f"Bearer {KEY}"), ("x-api-key", "wrong")) == 200
    assert await status(("authorization", "Bearer wrong"), ("x-api-key", KEY)) == 401
