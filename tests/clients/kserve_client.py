"""The KServe project's client over gRPC. It has no streams, and a prompt is text without tools.

Its parameters are whole numbers, booleans and text, so that sampling with fractions goes into the
tensor `sampling_parameters`, as JSON.
"""

import asyncio
import json
from typing import Any

import grpc
import numpy as np
import pytest
import support as s
from kserve import InferenceGRPCClient, InferInput, InferRequest

HEADERS = (("authorization", f"Bearer {s.API_KEY}"),)
GREEDY: Any = {"temperature": 0, "max_tokens": s.TOKENS}
LONG: Any = {"max_tokens": s.LONG_TOKENS, "ignore_eos": True}


def opened() -> Any:
    """A client, to be used in one event loop."""
    return InferenceGRPCClient(s.GRPC, retries=0)


def tensor(name: str, text: str) -> Any:
    """A tensor of one text."""
    made = InferInput(name, [1], "BYTES")
    made.set_data_from_numpy(np.array([text.encode()], object))
    return made


def asked(prompt: str, model: str = s.MODEL, in_tensor: bool = False, **sampling: Any) -> Any:
    """A request; its sampling in the parameters or in a tensor."""
    chosen = {**GREEDY, **sampling}
    inputs = [tensor("text_input", prompt)]
    if in_tensor:
        return InferRequest(model, [*inputs, tensor("sampling_parameters", json.dumps(chosen))])
    return InferRequest(model, inputs, parameters=chosen)


async def infer(request: Any, **more: Any) -> str:
    """The text of the response."""
    async with opened() as client:
        response = await client.infer(request, headers=HEADERS, **more)
    (output,) = [tensor for tensor in response.outputs if tensor.name == "text_output"]
    values = output.as_numpy().reshape(-1)
    return s.joined(value.decode() if isinstance(value, bytes) else str(value) for value in values)


async def test_server_and_model() -> None:
    async with opened() as client:
        assert await client.is_server_live(headers=HEADERS)
        assert await client.is_server_ready(headers=HEADERS)
        assert await client.is_model_ready(s.MODEL, headers=HEADERS)
        assert not await client.is_model_ready(s.UNKNOWN_MODEL, headers=HEADERS)


async def test_infer() -> None:
    assert await infer(asked(s.PROMPT)) == s.completion_text()
    assert await infer(asked(s.PROMPT), timeout=60.0) == s.completion_text()


async def test_typed_contents() -> None:
    text = InferInput("text_input", [1], "BYTES", data=[s.PROMPT.encode()])
    assert await infer(InferRequest(s.MODEL, [text], parameters=GREEDY)) == s.completion_text()


async def test_sampling_in_a_tensor() -> None:
    sampled: Any = {"in_tensor": True, "temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20}
    assert await infer(asked(s.PROMPT, **sampled)) == await infer(asked(s.PROMPT, **sampled))


async def test_four_at_once() -> None:
    assert all(await asyncio.gather(*(infer(asked(s.PROMPT)) for _ in range(4))))


async def test_a_cancelled_task_is_cancelled() -> None:
    await s.cancelled(infer(asked(s.PROMPT, **LONG)))


async def test_a_call_past_its_deadline_is_cancelled() -> None:
    with s.given_up(), pytest.raises(grpc.aio.AioRpcError) as raised:
        await infer(asked(s.PROMPT, **LONG), timeout=1.0)
    assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"model": s.UNKNOWN_MODEL}, grpc.StatusCode.NOT_FOUND),
        ({"temperature": 9}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_errors(wrong: Any, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await infer(asked(s.PROMPT, **wrong))
    assert raised.value.code() == code


async def test_schema() -> None:
    schema = json.dumps({"json": s.CITY_SCHEMA})
    more: Any = {"max_tokens": s.ANSWER_TOKENS, "structured_outputs": schema}
    s.check_city(await infer(asked(s.CITY_QUESTION, **more)))
