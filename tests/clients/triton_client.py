"""tritonclient over gRPC, in both dialects; a prompt is text, and the protocol has no tools.

Triton's vLLM backend has the tensors `stream`, `sampling_parameters` and `exclude_input_in_output`,
Dynamo has `streaming`, and the sampling in the request's parameters.
"""

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import support as s
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

client = triton.InferenceServerClient(s.GRPC)
KEY: Any = {"headers": {"authorization": f"Bearer {s.API_KEY}"}}
GREEDY: Any = {"temperature": 0, "max_tokens": s.TOKENS}
LONG: Any = {"max_tokens": s.LONG_TOKENS, "ignore_eos": True}


class Answers(queue.Queue[tuple[Any, Any]]):
    """Results and errors of a client's callback."""

    def callback(self, result: Any, error: Any) -> None:
        self.put((result, error))

    def next(self) -> tuple[Any, Any]:
        return self.get(timeout=60)


def tensor(name: str, value: str | bool) -> Any:
    """A tensor of one element."""
    text = isinstance(value, str)
    made = triton.InferInput(name, [1], "BYTES" if text else "BOOL")
    made.set_data_from_numpy(np.array([value.encode()], object) if text else np.array([value]))
    return made


def vllm(prompt: str, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A prompt as Triton's vLLM backend takes it."""
    inputs = [
        tensor("text_input", prompt),
        tensor("stream", stream),
        tensor("sampling_parameters", json.dumps({**GREEDY, **sampling})),
        tensor("exclude_input_in_output", True),
    ]
    return {"inputs": inputs}


def dynamo(prompt: str, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A prompt as Dynamo takes it."""
    inputs = [tensor("text_input", prompt), tensor("streaming", stream)]
    return {"inputs": inputs, "parameters": {**GREEDY, **sampling}}


dialects = pytest.mark.parametrize("dialect", [vllm, dynamo])


def text_of(result: Any) -> str:
    return s.joined(value.decode() for value in result.as_numpy("text_output").reshape(-1))


@contextmanager
def streaming() -> Iterator[tuple[Any, Answers]]:
    """A client with a stream, of which each client has one, and its answers."""
    answers = Answers()
    opened = triton.InferenceServerClient(s.GRPC)
    opened.start_stream(answers.callback, **KEY)
    try:
        yield opened, answers
    finally:
        opened.close()


def streamed(call: dict[str, Any], opened: Any, answers: Answers) -> str:
    """The text of a call on the stream."""
    opened.async_stream_infer(s.MODEL, enable_empty_final_response=True, **call)
    pieces = []
    while True:
        result, error = answers.next()
        assert error is None
        if take_piece(result, pieces):
            return s.joined(pieces)


def take_piece(result: Any, pieces: list[str]) -> bool:
    """Add the text of a response to `pieces`; returns whether it is the last response."""
    response = result.get_response()
    if any(output.name == "text_output" for output in response.outputs):
        pieces.append(text_of(result))
    return bool(response.parameters["triton_final_response"].bool_param)


def test_ready() -> None:
    assert client.is_server_live(**KEY) and client.is_server_ready(**KEY)
    assert client.is_model_ready(s.MODEL, **KEY)
    assert not client.is_model_ready(s.UNKNOWN_MODEL, **KEY)


def test_metadata() -> None:
    assert client.get_server_metadata(**KEY).name == "tideserve"
    model = client.get_model_metadata(s.MODEL, **KEY)
    assert "text_input" in [tensor.name for tensor in model.inputs]
    assert "text_output" in [tensor.name for tensor in model.outputs]
    assert client.get_model_config(s.MODEL, **KEY).config.model_transaction_policy.decoupled


@dialects
def test_infer(dialect: Any) -> None:
    assert text_of(client.infer(s.MODEL, **dialect(s.PROMPT), **KEY)) == s.completion_text()


def test_four_at_once() -> None:
    answers = Answers()
    for _ in range(4):
        client.async_infer(s.MODEL, callback=answers.callback, **vllm(s.PROMPT), **KEY)
    for _ in range(4):
        result, error = answers.next()
        assert error is None and text_of(result)


async def test_infer_of_asyncio() -> None:
    async with triton_aio.InferenceServerClient(s.GRPC) as opened:
        result = await opened.infer(s.MODEL, **vllm(s.PROMPT), **KEY)
    assert text_of(result) == s.completion_text()


def test_sampling_parameters() -> None:
    sampled: Any = {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    call = vllm(s.PROMPT, **sampled, presence_penalty=0.1, stop=["zzz"])
    first, again = (client.infer(s.MODEL, **call, **KEY) for _ in range(2))
    assert text_of(first) == text_of(again)


@dialects
def test_stream(dialect: Any) -> None:
    with streaming() as stream:
        assert streamed(dialect(s.PROMPT, stream=True), *stream) == s.completion_text()
        assert streamed(dialect(s.PROMPT, stream=True), *stream) == s.completion_text()
        assert streamed(dialect(s.PROMPT), *stream) == s.completion_text()


async def test_stream_of_asyncio() -> None:
    async def requests() -> Any:
        call = vllm(s.PROMPT, stream=True)
        yield {"model_name": s.MODEL, "enable_empty_final_response": True, **call}

    pieces: list[str] = []
    async with triton_aio.InferenceServerClient(s.GRPC) as opened:
        async for result, error in opened.stream_infer(requests(), **KEY):
            assert error is None
            if take_piece(result, pieces):
                break
    assert s.joined(pieces) == s.completion_text()


def test_a_stopped_stream_is_cancelled() -> None:
    with s.given_up(), streaming() as (opened, answers):
        opened.async_stream_infer(s.MODEL, **dynamo(s.PROMPT, stream=True, **LONG))
        _, error = answers.next()
        assert error is None
        opened.stop_stream(cancel_requests=True)


def test_a_cancelled_call_is_cancelled() -> None:
    answers = Answers()
    with s.given_up() as before:
        long = vllm(s.PROMPT, **LONG)
        call = client.async_infer(s.MODEL, callback=answers.callback, **long, **KEY)
        s.wait_for_token(before)
        call.cancel()
        _, error = answers.next()
    assert "cancel" in str(error).lower()


@pytest.mark.parametrize(
    ("model", "call", "code"),
    [
        (s.UNKNOWN_MODEL, vllm(s.PROMPT), "NOT_FOUND"),
        (s.MODEL, {"inputs": [tensor("pixels", "0")]}, "INVALID_ARGUMENT"),
    ],
)
def test_errors(model: str, call: dict[str, Any], code: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.infer(model, **call, **KEY)
    assert raised.value.status() == f"StatusCode.{code}"


def test_a_stream_continues_after_an_error() -> None:
    with streaming() as (opened, answers):
        opened.async_stream_infer(s.MODEL, **vllm(s.PROMPT, temperature=9))
        result, error = answers.next()
        assert result is None and "temperature" in str(error)
        assert streamed(vllm(s.PROMPT), opened, answers) == s.completion_text()


def test_refused_by_decision() -> None:
    with pytest.raises(InferenceServerException) as raised:
        client.get_model_repository_index(**KEY)
    assert raised.value.status() == "StatusCode.UNIMPLEMENTED"


def test_schema() -> None:
    schema = {"json": s.CITY_SCHEMA}
    call = vllm(s.CITY_QUESTION, max_tokens=s.ANSWER_TOKENS, structured_outputs=schema)
    s.check_city(text_of(client.infer(s.MODEL, **call, **KEY)))
