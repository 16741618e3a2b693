"""Records of requests that are refused by the middleware."""

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.common.tracing import TraceContext, Tracer
from services.gateway.http.request_middleware import HEADER_BYTES_MAX, RequestMiddleware
from services.gateway.keys.key_ring import KeyRing
from services.gateway.records.metrics import Metrics
from services.gateway.records.request_record import record_of
from services.gateway.records.request_recorder import RequestRecorder
from tests.support.asgi import answer_ok
from tests.support.kept_traces import KeptTraces

KEY = "k" * 20
CALLER = TraceContext("1" * 32, "2" * 16, sampled=True)


@pytest.mark.parametrize(
    ("headers", "status", "traces_per_request"),
    [
        ({"authorization": f"Bearer {KEY}"}, 200, 1),
        ({"authorization": "Bearer wrong"}, 401, 0),
        ({}, 401, 0),
        ({"x-long": "x" * HEADER_BYTES_MAX}, 431, 0),
    ],
)
async def test_only_authorized_callers_control_sampling(
    headers: dict[str, str], status: int, traces_per_request: int
) -> None:
    kept = KeptTraces()
    recorder = RequestRecorder(Metrics(("m",), CollectorRegistry()), Tracer(1.0, kept))
    door = RequestMiddleware(answer_ok, KeyRing(KEY), recorder)
    transport = httpx.ASGITransport(app=door)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        given = headers | {"traceparent": CALLER.traceparent}
        got = await client.post("/v1/chat/completions", headers=given)
        bare = await client.post("/v1/chat/completions", headers=headers)
    assert got.status_code == bare.status_code == status
    assert len(kept.traces) == 2 * traces_per_request
    assert [trace.trace_id for trace, _ in kept.traces[:1]] == [
        CALLER.trace_id
    ] * traces_per_request


async def test_a_record_has_the_client_address() -> None:
    addresses = list[str]()

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        addresses.append(record_of(scope).address)
        await answer_ok(scope, receive, send)

    door = RequestMiddleware(
        noted, KeyRing(None), RequestRecorder(Metrics(("m",), CollectorRegistry()), None)
    )
    transport = httpx.ASGITransport(app=door, client=("192.0.2.1", 5000))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        await client.get("/live")
    assert addresses == ["192.0.2.1"]
