"""What clients may hold at the gateway's doors, and for how long."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.common.etcd import Store
from services.gateway.api.requests import Generation
from services.gateway.api.responses import ResponsesRequest
from tests.support.gateway import Case, gateway_case
from tests.support.waiting import eventually
from tideserve.kserve.v2 import inference_pb2 as kpb
from tideserve.kserve.v2 import inference_pb2_grpc

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "enum": [[]] * 900}}
HELD = "tideserve_gateway_body_bytes"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def case(store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    async with gateway_case(store, tmp_path / "model") as case:
        yield case


def bodies() -> list[Any]:
    """The bodies that are held by anybody in this process."""
    return [one for one in gc.get_objects() if isinstance(one, Generation | ResponsesRequest)]


def inference(text: str) -> kpb.ModelInferRequest:
    request = kpb.ModelInferRequest(model_name="m", id="7")
    made = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    made.contents.bytes_contents.append(text.encode())
    return request


async def test_nobody_holds_a_body_once_it_is_prepared(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.pause_at = 1
    chat = {"model": "m", "messages": MESSAGES, "max_tokens": 4}
    # Tools that are not told the model take room only.
    unused = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "none"}
    response = {"model": "m", "input": "hi", "tools": [TOOL], "tool_choice": "none"}
    posts = [
        ("/v1/chat/completions", chat | unused),
        ("/v1/chat/completions", chat | unused | {"stream": True}),
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 4}),
        ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 4, "stream": True}),
        ("/v1/messages", chat),
        ("/v1/messages", chat | {"stream": True}),
        ("/v1/responses", response),
        ("/v1/responses", response | {"stream": True}),
    ]
    async with grpc.aio.insecure_channel(case.target) as channel, asyncio.TaskGroup() as tasks:
        stub = inference_pb2_grpc.GRPCInferenceServiceStub(channel)
        asked = [tasks.create_task(case.http.post(path, json=body)) for path, body in posts]
        whole = tasks.create_task(case.grpc.chat("hi", model="m", max_tokens=4))
        infer = stub.ModelInfer(inference("hi"))
        stream = stub.ModelStreamInfer()
        await stream.write(inference("hi"))
        await eventually(lambda: len(worker.active) == len(posts) + 3)
        assert bodies() == []
        worker.go.set()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * len(posts)
        assert answers[6].json()["tools"] == [TOOL]
        assert '"tool_choice":"none"' in answers[7].text
        assert (await whole).usage.completion_tokens == 4
        assert (await infer).id == "7"
        assert (await stream.read()).infer_response.id == "7"
        stream.cancel()


async def test_what_a_response_repeats_counts_until_it_is_over(case: Case) -> None:
    worker = case.cluster.workers[0]
    worker.pause_at = 1

    async def held() -> float:
        text = (await case.http.get("/metrics")).text
        rows = [line.split() for line in text.splitlines() if line.startswith(f"{HELD} ")]
        return float(rows[0][-1])

    body = {"model": "m", "input": "hi", "max_output_tokens": 4, "metadata": {"a": "x" * 100_000}}
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(case.http.post("/v1/responses", json=body))
        await eventually(lambda: len(worker.active) == 1)
        assert 80_000 < await held() < 110_000
        worker.go.set()
    assert answer.result().json()["metadata"] == body["metadata"]
    assert await held() == 0
