"""KServe's protocol at the gateway's gRPC port, in front of fake services."""

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.common.etcd import Store
from services.core.quota.limits import QuotaLimits
from services.gateway.grpc import kserve_service
from services.gateway.keys.key_file import ID_DIGITS, hash_of
from tests.support.gateway import TEXT, TIMEOUT_S, Case, gateway_case
from tests.support.waiting import eventually
from tideserve.cli.keys import add_key, revoke_keys
from tideserve.client import AsyncClient
from tideserve.kserve.v2 import inference_pb2 as pb
from tideserve.kserve.v2 import inference_pb2_grpc

SERVICE = "inference.GRPCInferenceService"
Stub = Any


@pytest.fixture
async def stub(case: Case) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(case.target) as channel:
        yield inference_pb2_grpc.GRPCInferenceServiceStub(channel)


def ask(
    prompt: str, stream: bool = False, request_id: str = "", model: str = "m", **sampling: Any
) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id=request_id)
    for name, text in (("text_input", prompt), ("sampling_parameters", json.dumps(sampling))):
        made = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        made.contents.bytes_contents.append(text.encode())
    for name, value in (("stream", stream), ("exclude_input_in_output", True)):
        made = request.inputs.add(name=name, datatype="BOOL", shape=[1])
        made.contents.bool_contents.append(value)
    return request


def texts_of(response: pb.ModelInferResponse, name: str = "text_output") -> list[str]:
    (index,) = (i for i, output in enumerate(response.outputs) if output.name == name)
    data, texts = response.raw_output_contents[index], []
    while data:
        (size,) = struct.unpack_from("<I", data)
        texts.append(data[4 : 4 + size].decode())
        data = data[4 + size :]
    return texts


def is_final(response: pb.ModelInferResponse) -> bool:
    return response.parameters["triton_final_response"].bool_param


async def test_model_metadata(case: Case, stub: Stub) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    known = {("m", ""): True, ("m", "1"): True, ("m", "2"): False, ("x", ""): False}
    for (name, version), ready in known.items():
        asked = pb.ModelReadyRequest(name=name, version=version)
        assert (await stub.ModelReady(asked)).ready is ready
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "tideserve"
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="m"))
    assert metadata.inputs[0].name == "text_input" and metadata.outputs[0].name == "text_output"
    config = (await stub.ModelConfig(pb.ModelConfigRequest(name="m"))).config
    assert config.model_transaction_policy.decoupled and not config.input[0].optional
    for call, wrong in (
        (stub.ModelMetadata, pb.ModelMetadataRequest(name="x")),
        (stub.ModelConfig, pb.ModelConfigRequest(name="m", version="2")),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(wrong)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    async with grpc.aio.insecure_channel(case.target) as channel:
        for name in ("RepositoryIndex", "SystemSharedMemoryStatus", "TraceSetting", "LogSettings"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(f"/{SERVICE}/{name}")(b"", timeout=TIMEOUT_S)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_aliases_are_served_as_models(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    keys = {
        names: add_key(path, f"for-{names}", False, names.split("+"), QuotaLimits())
        for names in ("m", "best", "best+second", "other")
    }
    async with (
        gateway_case(
            *(store, tmp_path / "model"),
            model_aliases="best,second",
            api_keys_file=path,
            sent_key=keys["m"],
        ) as case,
        grpc.aio.insecure_channel(case.target) as channel,
    ):
        stub: Stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        allowed = {"m": {"m", "best", "second"}, "best": {"best"}, "other": set()}
        allowed["best+second"] = {"best", "second"}
        for names, key in keys.items():
            metadata = (("authorization", f"Bearer {key}"),)
            for name in ("m", "best", "second", "x"):
                known = name in allowed[names]
                asked = pb.ModelReadyRequest(name=name)
                assert (await stub.ModelReady(asked, metadata=metadata)).ready is known, names
                for method, request in (
                    (stub.ModelMetadata, pb.ModelMetadataRequest(name=name)),
                    (stub.ModelConfig, pb.ModelConfigRequest(name=name)),
                    (stub.ModelInfer, ask("hi", model=name, max_tokens=1)),
                ):
                    code = await method(request, metadata=metadata).code()
                    assert (code is grpc.StatusCode.OK) is known, (names, name)
            async with AsyncClient(case.target, api_key=key, timeout_s=TIMEOUT_S) as client:
                assert {model.id for model in await client.models()} == allowed[names]
            headers = {"authorization": f"Bearer {key}"}
            listed = (await case.http.get("/v1/models", headers=headers)).json()["data"]
            assert {model["id"] for model in listed} == allowed[names]


async def test_whole_responses(case: Case, stub: Stub) -> None:
    answer = await stub.ModelInfer(ask("hi", max_tokens=8, request_id="7"))
    assert (texts_of(answer), texts_of(answer, "finish_reason")) == ([TEXT[:8]], ["length"])
    assert answer.id == "7"
    several = await stub.ModelInfer(ask("hi", max_tokens=8, n=3))
    assert texts_of(several) == [TEXT[:8]] * 3
    request = ask("hi", max_tokens=8)
    del request.inputs[3]
    assert texts_of(await stub.ModelInfer(request)) == ["hi" + TEXT[:8]], "as Triton does it"


async def test_errors_of_whole_responses(stub: Stub) -> None:
    cases = [
        (ask("hi", model="x"), grpc.StatusCode.NOT_FOUND),
        (ask("hi", temperature=9), grpc.StatusCode.INVALID_ARGUMENT),
        (ask("hi", stream=True), grpc.StatusCode.INVALID_ARGUMENT),
        (pb.ModelInferRequest(model_name="m"), grpc.StatusCode.INVALID_ARGUMENT),
    ]
    for request, code in cases:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        assert caught.value.code() is code


async def test_a_stream_of_requests(case: Case, stub: Stub) -> None:
    requests = [
        ask("hi", stream=True, request_id="streamed", max_tokens=8),
        ask("hi", request_id="whole", max_tokens=8),
        ask("hi", request_id="wrong", temperature=9),
        ask("hi", request_id="other", model="x"),
        ask("hi", stream=True, request_id="last", max_tokens=3),
    ]
    by_request: dict[str, list[pb.ModelStreamInferResponse]] = {}
    async for response in stub.ModelStreamInfer(iter(requests), timeout=TIMEOUT_S):
        by_request.setdefault(response.infer_response.id, []).append(response)
    assert set(by_request) == {"streamed", "whole", "wrong", "other", "last"}
    for responses in by_request.values():
        finals = [is_final(response.infer_response) for response in responses]
        assert finals == [False] * (len(finals) - 1) + [True]
    texts = {
        name: "".join(texts_of(response.infer_response)[0] for response in by_request[name])
        for name in ("streamed", "whole", "last")
    }
    assert texts == {"streamed": TEXT[:8], "whole": TEXT[:8], "last": TEXT[:3]}
    assert len(by_request["streamed"]) > 1 and len(by_request["whole"]) == 1
    assert texts_of(by_request["streamed"][-1].infer_response, "finish_reason") == ["length"]
    assert "temperature" in by_request["wrong"][0].error_message
    assert "does not exist" in by_request["other"][0].error_message
    metrics = (await case.http.get("/metrics")).text
    for status, count in (("200", 3), ("400", 1), ("404", 1)):
        labels = f'endpoint="/{SERVICE}/ModelStreamInfer",status="{status}"'
        assert f"tideserve_gateway_requests_total{{{labels}}} {count}.0" in metrics


async def test_an_invalid_request_in_a_stream_does_not_affect_others(case: Case) -> None:
    good = ask("hi", request_id="good", max_tokens=3).SerializeToString()
    async with grpc.aio.insecure_channel(case.target) as channel:
        call = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        answers = [
            pb.ModelStreamInferResponse.FromString(data)
            async for data in call(iter([b"\xff\xff", good]), timeout=TIMEOUT_S)
        ]
    assert {bool(answer.error_message) for answer in answers} == {True, False}


async def test_cancelling_a_stream_aborts_its_requests(case: Case, stub: Stub) -> None:
    worker = case.paused(2)

    async def requests() -> AsyncIterator[pb.ModelInferRequest]:
        yield ask("hi", stream=True)
        yield ask("hi", stream=True)
        await call_over.wait()

    call_over = asyncio.Event()
    call = stub.ModelStreamInfer(requests(), timeout=TIMEOUT_S)
    await call.read()
    await eventually(lambda: len(worker.active) == 2)
    call.cancel()
    call_over.set()
    await eventually(lambda: len(worker.aborted) == 2)


@pytest.mark.gateway(drain_timeout_s=50.0)
async def test_a_draining_gateway_does_not_wait_for_idle_streams(case: Case) -> None:
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub: Stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(timeout=TIMEOUT_S)
        await call.write(ask("hi", max_tokens=2))
        answers = [(await call.read()).infer_response]
        assert is_final(answers[-1])
        case.stop.set()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_revoked_key_starts_no_more_requests(store: Store, tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    add_key(keys, "bob", False, None, QuotaLimits())
    key = add_key(keys, "alice", False, None, QuotaLimits())
    metadata = (("authorization", f"Bearer {key}"),)
    async with (
        gateway_case(store, tmp_path / "model", api_keys_file=keys) as case,
        grpc.aio.insecure_channel(case.target) as channel,
    ):
        stub: Stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        worker = case.paused(2)
        call = stub.ModelStreamInfer(timeout=TIMEOUT_S, metadata=metadata)
        await call.write(ask("hi", stream=True, max_tokens=8))
        texts = texts_of((await call.read()).infer_response)
        assert revoke_keys(keys, [hash_of(key)[:ID_DIGITS]], None) == 1

        async def refused() -> bool:
            try:
                await stub.ServerLive(pb.ServerLiveRequest(), metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        await eventually(refused)
        await call.write(ask("hi", stream=True, max_tokens=8))
        await call.write(ask("hi", stream=True, max_tokens=8))
        worker.go.set()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                texts += texts_of((await call.read()).infer_response)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "".join(texts) == TEXT[:8], "what ran is answered"
        assert len(worker.starts) == 1


async def test_streams_without_requests_end(
    case: Case, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kserve_service, "STREAM_IDLE_S", 1.0)
    worker = case.paused(2)
    call = stub.ModelStreamInfer(timeout=TIMEOUT_S)
    await call.write(ask("hi", max_tokens=8))
    await eventually(lambda: len(worker.active) == 1)
    await asyncio.sleep(2.5)
    worker.go.set()
    answer = await call.read()
    assert texts_of(answer.infer_response) == [TEXT[:8]], "one that runs is waited for"
    with pytest.raises(grpc.aio.AioRpcError, match="no request arrived") as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_part_that_is_not_enforced_is_in_a_warning(case: Case, stub: Stub) -> None:
    schema = {"type": "array", "uniqueItems": True}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    call = stub.ModelInfer(ask("hi", response_format=form, max_tokens=4))
    warning = {name: text for name, text in await call.initial_metadata()}["warning"]
    assert warning == '299 tideserve "not enforced: $.uniqueItems"'
