"""Batch requests in the gateway: their slots, deadlines and refusal metrics."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from services.common.etcd import Store
from services.common.membership import WORKERS
from tests.support.control_plane import registered, worker_record
from tests.support.exposition import samples, value
from tests.support.gateway import Case, gateway_case
from tests.support.waiting import eventually
from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2, gateway_pb2_grpc

BATCH: dict[str, Any] = {"slo_class": "batch", "max_tokens": 9}


async def refused(case: Case, service_class: str) -> float | None:
    metrics = samples((await case.http.get("/metrics")).text)
    labels = {"model_name": "m", "reason": "queue_full", "class": service_class}
    return value(metrics, "vllm:admission_rejections_total", **labels)


@pytest.mark.gateway(inflight_max=3, batch_inflight_part=0.7)
async def test_a_batch_backlog_leaves_slots_to_online_requests_over_http_and_grpc(
    case: Case,
) -> None:
    worker = case.paused(1)
    backlog = [asyncio.create_task(case.complete(**BATCH)) for _ in range(2)]
    await eventually(lambda: len(worker.active) == 2)
    for _ in range(3):
        answer = await case.complete(**BATCH)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        assert 48 <= int(answer.headers["retry-after"]) <= 60, "no batch request has left lately"
    assert await refused(case, "batch") == 3
    # Without the client's retries, which follow Retry-After.
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        options = gateway_pb2.Options(service_class=service_pb2.SERVICE_CLASS_BATCH)
        prompt = gateway_pb2.Prompt(text="hi")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Complete(
                gateway_pb2.CompleteRequest(model="m", prompts=[prompt], options=options)
            )
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "of class 'batch'" in (caught.value.details() or "")
    keyed = await case.http.post(
        "/v1/completions",
        json={"model": "m", "prompt": "hi", **BATCH},
        headers={"idempotency-key": "a"},
    )
    assert keyed.status_code == 503
    assert await refused(case, "batch") == 5
    worker.pause_at = None
    assert (await case.complete(max_tokens=3)).status_code == 200
    answered = await case.grpc.complete("hi", model="m", max_tokens=3)
    assert answered.usage.completion_tokens == 3
    assert await refused(case, "standard") == 0
    worker.go.set()
    assert [answer.status_code for answer in await asyncio.gather(*backlog)] == [200, 200]
    assert (await case.complete(**BATCH)).status_code == 200


@pytest.mark.gateway(inflight_max=1)
async def test_requests_refused_before_parsing_have_no_class(case: Case) -> None:
    worker = case.paused(1)
    first = asyncio.create_task(case.complete(max_tokens=9))
    await eventually(lambda: worker.active)
    assert (await case.complete(**BATCH)).status_code == 503
    assert await refused(case, "unknown") == 1
    worker.go.set()
    assert (await first).status_code == 200


@pytest.mark.parametrize("late", ["batch", "standard"])
async def test_batch_requests_have_their_own_time_limit(
    store: Store, tmp_path: Path, late: str
) -> None:
    """One limit is reached long before the other, with which the test would hang."""
    limits = {"batch": "batch_timeout_s", "standard": "request_timeout_s"}
    async with gateway_case(store, tmp_path / "model", **{limits[late]: 1.0}) as case:
        worker = case.paused(1)
        running = {
            limit: asyncio.create_task(case.complete(slo_class=limit, max_tokens=9))
            for limit in limits
        }
        assert (await running.pop(late)).status_code == 504
        ((_, other),) = running.items()
        assert not other.done()
        worker.go.set()
        assert (await other).status_code == 200


async def test_the_status_warns_of_workers_with_other_scheduling(
    store: Store, tmp_path: Path
) -> None:
    """The fake scheduler uses slo, and the fake workers do not report theirs."""
    other = worker_record("other", scheduling="priority")
    async with gateway_case(store, tmp_path / "model") as case:

        async def warnings() -> list[str]:
            status = (await case.admin.get("/tideserve/v1/status")).json()
            assert "errors" not in status
            return list(status.get("warnings", []))

        assert await warnings() == []
        async with registered(store, f"{WORKERS}other", other):
            await eventually(warnings)
            (warning,) = await warnings()
            assert "scheduling slo, but workers with priority (other)" in warning
