"""Cancellation by id at this and at other gateways, and duplicate ids."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest

from services.common.etcd import Store
from services.gateway.app import serve
from services.gateway.keys.key_file import KeyEntry, hash_of
from tests.support.control_plane import serving
from tests.support.fake_cluster import FakeWorker
from tests.support.gateway import TIMEOUT_S, Case, gateway_case
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve import client as tide
from tideserve.client import AsyncClient
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc
from tideserve.kserve.v2 import inference_pb2 as kpb
from tideserve.kserve.v2 import inference_pb2_grpc

MINE, OTHERS = "k" * 24, "o" * 24


@asynccontextmanager
async def second_gateway(case: Case, key: str = "none") -> AsyncIterator[AsyncClient]:
    """A client of a second gateway of the same cluster."""
    port = free_port()
    config = replace(case.config, port=free_port(), admin_port=None, public_grpc_port=port)
    target = f"127.0.0.1:{port}"
    async with (
        serving(serve, config),
        AsyncClient(target, api_key=key, timeout_s=TIMEOUT_S) as client,
    ):

        async def serves() -> bool:
            return bool(await _models(client))

        await eventually(serves)
        yield client


async def _models(client: AsyncClient) -> list[Any]:
    try:
        return await client.models(timeout_s=5)
    except tide.TideserveError:
        return []


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with the keys of two owners."""
    path = tmp_path / "keys"
    rows = [
        KeyEntry(owner="mine", sha256=hash_of(MINE)),
        KeyEntry(owner="others", sha256=hash_of(OTHERS)),
    ]
    path.write_text("".join(f"{row.line()}\n" for row in rows))
    path.chmod(0o600)
    return path


async def running(case: Case) -> FakeWorker:
    """Wait for a paused request; returns its worker."""
    worker = case.cluster.workers[0]
    await eventually(lambda: worker.active)
    return worker


async def test_a_stream_is_cancelled_by_the_id_of_its_response(case: Case) -> None:
    case.cluster.workers[0].pause_at = 2
    async with case.grpc.stream_chat("hi", model="m") as stream:
        await anext(stream)
        assert await case.grpc.cancel(stream.id)
        with pytest.raises(tide.Cancelled) as caught:
            async for _ in stream:
                pass
    assert caught.value.reason == "CANCELLED"
    worker = case.cluster.workers[0]
    await eventually(lambda: worker.aborted == [stream.id])
    assert not await case.grpc.cancel(stream.id), "it is over"
    assert not await case.grpc.cancel("cmpl-unknown")
    with pytest.raises(tide.InvalidRequest):
        await case.grpc.cancel("")


async def test_a_call_is_cancelled_by_its_clients_id(case: Case) -> None:
    case.cluster.workers[0].pause_at = 2
    call = asyncio.create_task(case.grpc.chat("hi", model="m", request_id="mine"))
    await running(case)
    assert await case.grpc.cancel("mine")
    with pytest.raises(tide.Cancelled):
        await call


async def test_a_request_is_cancelled_by_its_header_over_http_and_grpc(case: Case) -> None:
    case.cluster.workers[0].pause_at = 2
    sent = {"x-request-id": "of/a-proxy"}
    body = {"model": "m", "prompt": "hi", "max_tokens": 9}
    async with (
        case.http.stream(
            "POST", "/v1/completions", json=body | {"stream": True}, headers=sent
        ) as streamed,
        grpc.aio.insecure_channel(case.target) as channel,
    ):
        lines = streamed.aiter_lines()
        await anext(lines)
        prompt = pb.Prompt(text="hi")
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Complete(
            pb.CompleteRequest(model="m", prompts=[prompt]), metadata=tuple(sent.items())
        )
        worker = case.cluster.workers[0]
        await eventually(lambda: len(worker.active) == 2)
        done = await case.http.post("/v1/requests/of/a-proxy/cancel")
        assert (done.status_code, done.json()["found"]) == (200, True)
        assert await call.code() is grpc.StatusCode.CANCELLED
        rest = [line async for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "cancelled"
    again = await case.http.post("/v1/requests/of/a-proxy/cancel")
    assert (again.status_code, again.json()["found"]) == (200, False)
    # A proxy sends the same id with all requests that it makes for one of its own.
    worker.pause_at = None
    for _ in range(2):
        answer = await case.http.post("/v1/completions", json=body, headers=sent)
        assert answer.status_code == 200


async def test_a_full_gateway_still_serves_other_calls(
    store: Store, tmp_path: Path, keys: Path
) -> None:
    async with (
        gateway_case(
            store, tmp_path / "model", inflight_max=1, api_keys_file=keys, sent_key=MINE
        ) as case,
        grpc.aio.insecure_channel(case.target) as channel,
    ):
        case.paused(2)
        async with case.grpc.stream_chat("hi", model="m", max_tokens=9) as stream:
            await anext(stream)
            assert (await case.complete()).status_code == 503, "it is full"
            assert [model.id for model in await case.grpc.models()] == ["m"]
            kserve: Any = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = (("authorization", f"Bearer {MINE}"),)
            assert (
                await kserve.ModelReady(kpb.ModelReadyRequest(name="m"), metadata=metadata)
            ).ready
            await kserve.ModelMetadata(kpb.ModelMetadataRequest(name="m"), metadata=metadata)
            assert await case.grpc.cancel(stream.id)
            with pytest.raises(tide.Cancelled):
                async for _ in stream:
                    pass


async def test_requests_of_a_draining_gateway_are_cancelled_through_another(case: Case) -> None:
    case.cluster.workers[0].pause_at = 2

    async def draining() -> bool:
        return (await case.complete()).status_code == 503

    async with (
        second_gateway(case) as other,
        case.grpc.stream_chat("hi", model="m", max_tokens=9) as stream,
    ):
        await anext(stream)
        case.stop.set()
        await eventually(draining)
        done = await case.http.post("/v1/requests/never-seen/cancel")
        assert (done.status_code, done.json()["found"]) == (200, False)
        assert await other.cancel(stream.id)
        with pytest.raises(tide.Cancelled):
            async for _ in stream:
                pass


async def test_every_http_endpoint_is_cancellable(case: Case) -> None:
    case.cluster.workers[0].pause_at = 2
    whole = asyncio.create_task(case.complete(request_id="mine", max_tokens=9))
    await running(case)
    done = await case.http.post("/v1/requests/mine/cancel")
    cancelled = {"id": "mine", "object": "request.cancelled", "found": True}
    assert (done.status_code, done.json()) == (200, cancelled)
    answer = await whole
    assert (answer.status_code, answer.json()["error"]["code"]) == (499, "cancelled")
    async with case.stream(max_tokens=9) as streamed:
        lines = streamed.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))
        await case.grpc.cancel(first["id"])
        rest = [line async for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "cancelled"
    assert "data: [DONE]" not in rest


async def test_gateways_forward_a_cancel(case: Case) -> None:
    case.cluster.workers[0].pause_at = 2
    async with second_gateway(case) as other:
        async with case.grpc.stream_chat("hi", model="m") as stream:
            await anext(stream)
            assert await other.cancel(stream.id)
            with pytest.raises(tide.Cancelled):
                async for _ in stream:
                    pass
        call = asyncio.create_task(case.grpc.complete("hi", model="m", request_id="mine"))
        await running(case)
        assert await other.cancel("mine")
        with pytest.raises(tide.Cancelled):
            await call
        assert not await other.cancel("never-seen")


async def test_only_the_owner_can_cancel_a_request(
    store: Store, tmp_path: Path, keys: Path
) -> None:
    async with gateway_case(store, tmp_path / "model", api_keys_file=keys, sent_key=MINE) as case:
        worker = case.paused(2)
        async with (
            AsyncClient(case.target, api_key=OTHERS, timeout_s=TIMEOUT_S) as stranger,
            second_gateway(case, OTHERS) as elsewhere,
            httpx.AsyncClient(
                base_url=case.url, headers={"authorization": f"Bearer {OTHERS}"}
            ) as http,
            case.grpc.stream_chat("hi", model="m", max_tokens=4, request_id="mine") as stream,
        ):
            await anext(stream)
            for request_id in (stream.id, "mine"):
                assert not await stranger.cancel(request_id)
                assert not await elsewhere.cancel(request_id)
                done = await http.post(f"/v1/requests/{request_id}/cancel")
                assert (done.status_code, done.json()["found"]) == (200, False)
            worker.go.set()
            pieces = [piece async for piece in stream]
        assert pieces[-1].usage.completion_tokens == 4
        assert worker.aborted == []
        # Another owner can use the same id.
        async with AsyncClient(case.target, api_key=OTHERS, timeout_s=TIMEOUT_S) as stranger:
            await stranger.complete("hi", model="m", max_tokens=1, request_id="mine")


async def test_an_id_is_unique_over_http_and_grpc(case: Case) -> None:
    await case.grpc.complete("hi", model="m", max_tokens=1, request_id="one")
    with pytest.raises(tide.AlreadyExists) as caught:
        await case.grpc.chat("hi", model="m", request_id="one")
    assert (caught.value.reason, caught.value.field) == ("DUPLICATE_REQUEST", "request_id")
    again = await case.complete(request_id="one", max_tokens=1)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "duplicate_request")
    assert (await case.complete(request_id="two", max_tokens=1)).status_code == 200
    with pytest.raises(tide.AlreadyExists):
        await case.grpc.complete("hi", model="m", max_tokens=1, request_id="two")
    # A call without a token may be retried.
    assert (await case.complete(request_id="three", temperature=9)).status_code == 400
    assert (await case.complete(request_id="three", max_tokens=1)).status_code == 200
    assert len(case.cluster.workers[0].starts) == 3


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model") as case:
        yield case
