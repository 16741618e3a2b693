"""Limits on the memory that clients occupy in the gateway."""

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import pytest

from services.common.etcd import Store
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.responses import ResponsesRequest
from services.gateway.serving import output
from tests.support.gateway import Case, gateway_case
from tests.support.waiting import eventually
from tideserve import client as tide
from tideserve.kserve.v2 import inference_pb2 as kpb
from tideserve.kserve.v2 import inference_pb2_grpc

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "enum": [[]] * 900}}
INFLIGHT = "tideserve_gateway_requests_inflight"
MESSAGES = [{"role": "user", "content": "hi"}]


def bodies() -> list[Any]:
    """Request bodies in this process's memory."""
    kinds = (GenerationRequest, ResponsesRequest)
    # Not isinstance, as some library objects warn when their class is read.
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kinds)]


async def value(case: Case, name: str) -> float:
    """A metric without labels."""
    text = (await case.http.get("/metrics")).text
    (row,) = (line for line in text.splitlines() if line.startswith(f"{name} "))
    return float(row.split()[-1])


@contextlib.contextmanager
def unread(case: Case, path: str, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A client that reads almost nothing of the response."""
    place, data = urlsplit(case.url), json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((place.hostname, place.port))
        client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        yield client


def inference(text: str) -> kpb.ModelInferRequest:
    request = kpb.ModelInferRequest(model_name="m", id="7")
    made = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    made.contents.bytes_contents.append(text.encode())
    return request


async def test_bodies_are_released_once_prepared(case: Case) -> None:
    gc.collect()  # bodies of other tests in reference cycles with their errors
    worker = case.paused(1)
    chat = {"model": "m", "messages": MESSAGES, "max_tokens": 4}
    # Tools that are not rendered only occupy memory.
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


async def test_repeated_parts_of_a_response_count_until_it_ends(case: Case) -> None:
    worker = case.paused(1)

    async def held() -> float:
        return await value(case, "tideserve_gateway_body_bytes")

    body = {"model": "m", "input": "hi", "max_output_tokens": 4, "metadata": {"a": "x" * 100_000}}
    async with asyncio.TaskGroup() as tasks:
        answer = tasks.create_task(case.http.post("/v1/responses", json=body))
        await eventually(lambda: len(worker.active) == 1)
        assert 80_000 < await held() < 110_000
        worker.go.set()
    assert answer.result().json()["metadata"] == body["metadata"]
    assert await held() == 0


async def test_a_whole_response_counts_until_its_client_has_read_it(
    store: Store, tmp_path: Path
) -> None:
    # Longer than the kernel's buffers of a connection, 4 MiB.
    logprobs = {"logprobs": True, "top_logprobs": 20, "n": 4, "max_tokens": 1500}
    posts = [
        ("/v1/chat/completions", {"model": "m", "messages": MESSAGES} | logprobs),
        ("/tokenize", {"model": "m", "prompt": "x" * 1_000_000, "return_token_strs": True}),
    ]
    async with gateway_case(
        store, tmp_path / "model", max_model_len=300_000, client_stall_s=2.0
    ) as case:
        case.cluster.workers[0].tokens_per_event = 500

        async def gone(path: str) -> bool:
            text = (await case.http.get("/metrics")).text
            return any(path in row and 'status="499"' in row for row in text.splitlines())

        for path, body in posts:
            answer = await case.http.post(path, json=body)
            assert answer.status_code == 200 and len(answer.content) > 5 * 2**20
            with unread(case, path, body):
                await eventually(partial(gone, path))
            assert await value(case, INFLIGHT) == 0


async def test_log_probabilities_of_whole_responses_are_bounded(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "OUTPUT_LOGPROBS_MAX", 100)
    logprobs = {"logprobs": True, "top_logprobs": 4}
    fits = await case.chat(**logprobs, n=2, max_tokens=10)
    assert fits.status_code == 200 and len(fits.json()["choices"][1]["logprobs"]["content"]) == 10
    for n, max_tokens in ((1, 21), (2, 11)):
        over = await case.chat(**logprobs, n=n, max_tokens=max_tokens)
        assert over.status_code == 400
        assert over.json()["error"]["param"] == "logprobs"
    assert (await case.complete(logprobs=4, max_tokens=21)).status_code == 400
    stream = await case.chat(**logprobs, max_tokens=50, stream=True)
    assert stream.text.endswith("data: [DONE]\n\n"), "a stream keeps none"
    with pytest.raises(tide.InvalidRequest):
        await case.grpc.chat("hi", model="m", logprobs=True, top_logprobs=4, max_tokens=21)
    # The Responses API repeats them in its last event.
    asked = {"model": "m", "input": "hi", "top_logprobs": 4, "max_output_tokens": 21}
    whole = await case.http.post("/v1/responses", json=asked)
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, "top_logprobs")
    failed = await case.http.post("/v1/responses", json=asked | {"stream": True})
    assert "event: response.failed" in failed.text
    assert (await case.chat(max_tokens=50)).status_code == 200
