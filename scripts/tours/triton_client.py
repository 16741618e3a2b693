"""tritonclient over gRPC, in both dialects: Triton's vLLM backend and Dynamo's.

Triton's tensors are `stream`, `sampling_parameters` and `exclude_input_in_output`, Dynamo's is
`streaming` with the sampling in the request's parameters.
"""

import json
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tours import task
from tours.tour import Tour, check, equal, joined, refused, validate

tour = Tour()
client = triton.InferenceServerClient(tour.grpc)
HEADERS = {"authorization": f"Bearer {tour.api_key}"}
GREEDY: Any = {"temperature": 0, "max_tokens": task.TOKENS}
LONG: Any = {"temperature": 0, "max_tokens": task.LONG_TOKENS, "ignore_eos": True}
ANSWER_TIMEOUT_S = 60.0
Answers: TypeAlias = "queue.Queue[tuple[Any, Any]]"
"""A result or an error, as they come."""


def tensor(name: str, value: str | bool) -> Any:
    """A tensor of one element."""
    kind = "BYTES" if isinstance(value, str) else "BOOL"
    data = np.array([value.encode()], object) if isinstance(value, str) else np.array([value])
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(data)
    return made


def vllm_inputs(prompt: str, stream: bool = False, **sampling: Any) -> list[Any]:
    """A prompt as Triton's vLLM backend takes it."""
    return [
        tensor("text_input", prompt),
        tensor("stream", stream),
        tensor("sampling_parameters", json.dumps({**GREEDY, **sampling})),
        tensor("exclude_input_in_output", True),
    ]


def dynamo(prompt: str, stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """A prompt as Dynamo takes it."""
    inputs = [tensor("text_input", prompt), tensor("streaming", stream)]
    return {"inputs": inputs, "parameters": {**GREEDY, **sampling}}


def text_of(result: Any) -> str:
    """The text of a result."""
    return joined([value.decode() for value in result.as_numpy("text_output").reshape(-1)])


@contextmanager
def streaming() -> Iterator[tuple[Any, Answers]]:
    """A client with a stream, of which each client has one, and what comes on it."""
    answers: Answers = queue.Queue()
    opened = triton.InferenceServerClient(tour.grpc)
    opened.start_stream(lambda result, error: answers.put((result, error)), headers=HEADERS)
    try:
        yield opened, answers
    finally:
        opened.close()


def streamed(calls: list[dict[str, Any]]) -> list[list[str]]:
    """The pieces of the calls' texts, which are made on one stream one after the other."""
    texts: list[list[str]] = []
    with streaming() as (opened, answers):
        for number, call in enumerate(calls):
            opened.async_stream_infer(
                tour.model, request_id=str(number), enable_empty_final_response=True, **call
            )
            texts.append(_until_final(answers))
    return texts


def _until_final(answers: Answers) -> list[str]:
    pieces = []
    while True:
        result, error = answers.get(timeout=ANSWER_TIMEOUT_S)
        if error is not None:
            raise error
        response = result.get_response()
        if any(output.name == "text_output" for output in response.outputs):
            pieces.append(text_of(result))
        if response.parameters["triton_final_response"].bool_param:
            return pieces


@tour.call("about", "is_server_live, is_server_ready, is_model_ready")
def _ready() -> None:
    check(client.is_server_live(headers=HEADERS), "not live")
    check(client.is_server_ready(headers=HEADERS), "not ready")
    check(client.is_model_ready(tour.model, headers=HEADERS), "the model is not ready")
    check(not client.is_model_ready(task.UNKNOWN_MODEL, headers=HEADERS), "a model too many")


@tour.call("about", "get_server_metadata, get_model_metadata, get_model_config")
def _metadata() -> None:
    equal(client.get_server_metadata(headers=HEADERS).name, "tideserve", "name")
    model = client.get_model_metadata(tour.model, headers=HEADERS)
    check("text_input" in [one.name for one in model.inputs], "no text_input")
    check("text_output" in [one.name for one in model.outputs], "no text_output")
    config = client.get_model_config(tour.model, headers=HEADERS).config
    check(config.model_transaction_policy.decoupled, "not decoupled")


@tour.call("unary", "infer, Triton's dialect")
def _infer() -> None:
    result = client.infer(tour.model, vllm_inputs(task.PROMPT), headers=HEADERS)
    equal(text_of(result), tour.plain.completion_text)


@tour.call("unary", "infer, Dynamo's dialect")
def _infer_dynamo() -> None:
    result = client.infer(tour.model, headers=HEADERS, **dynamo(task.PROMPT))
    equal(text_of(result), tour.plain.completion_text)


@tour.call("unary", "async_infer, four at once")
def _at_once() -> None:
    answers: Answers = queue.Queue()
    for _ in range(4):
        client.async_infer(
            tour.model,
            vllm_inputs(task.PROMPT),
            lambda result, error: answers.put((result, error)),
            headers=HEADERS,
        )
    for _ in range(4):
        result, error = answers.get(timeout=ANSWER_TIMEOUT_S)
        check(error is None and text_of(result), str(error))


@tour.call("unary", "infer of asyncio")
async def _infer_async() -> None:
    async with triton_aio.InferenceServerClient(tour.grpc) as opened:
        result = await opened.infer(tour.model, vllm_inputs(task.PROMPT), headers=HEADERS)
    equal(text_of(result), tour.plain.completion_text)


@tour.call("unary", "infer: sampling parameters")
def _sampling() -> None:
    sampled: Any = {"temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    inputs = vllm_inputs(task.PROMPT, **sampled, presence_penalty=0.1, stop=["zzz"])
    first = client.infer(tour.model, inputs, headers=HEADERS)
    again = client.infer(tour.model, inputs, headers=HEADERS)
    equal(text_of(first), text_of(again))


@tour.call("stream", "async_stream_infer, Triton's dialect")
def _stream() -> None:
    (pieces,) = streamed([{"inputs": vllm_inputs(task.PROMPT, stream=True)}])
    equal(joined(pieces), tour.plain.completion_text)


@tour.call("stream", "async_stream_infer, Dynamo's dialect, two on one stream")
def _stream_dynamo() -> None:
    for pieces in streamed([dynamo(task.PROMPT, stream=True)] * 2):
        equal(joined(pieces), tour.plain.completion_text)


@tour.call("stream", "async_stream_infer of a whole answer")
def _stream_whole() -> None:
    (pieces,) = streamed([{"inputs": vllm_inputs(task.PROMPT)}])
    equal(joined(pieces), tour.plain.completion_text)


@tour.call("stream", "stream_infer of asyncio")
async def _stream_async() -> None:
    async def requests() -> Any:
        yield {
            "model_name": tour.model,
            "inputs": vllm_inputs(task.PROMPT, stream=True),
            "enable_empty_final_response": True,
        }

    pieces = []
    async with triton_aio.InferenceServerClient(tour.grpc) as opened:
        async for result, error in opened.stream_infer(requests(), headers=HEADERS):
            check(error is None, str(error))
            response = result.get_response()
            if any(output.name == "text_output" for output in response.outputs):
                pieces.append(text_of(result))
            if response.parameters["triton_final_response"].bool_param:
                break
    equal(joined(pieces), tour.plain.completion_text)


@tour.call("cancel", "stop_stream with cancel_requests")
def _stop() -> None:
    with tour.given_up(), streaming() as (opened, answers):
        opened.async_stream_infer(tour.model, **dynamo(task.PROMPT, stream=True, **LONG))
        _, error = answers.get(timeout=ANSWER_TIMEOUT_S)
        check(error is None, str(error))
        opened.stop_stream(cancel_requests=True)


@tour.call("cancel", "async_infer that is cancelled")
def _cancel() -> None:
    answers: Answers = queue.Queue()
    with tour.given_up():
        before = tour.plain.output_tokens()
        call = client.async_infer(
            tour.model,
            vllm_inputs(task.PROMPT, **LONG),
            lambda result, error: answers.put((result, error)),
            headers=HEADERS,
        )
        tour.plain.wait_for_output(before)
        call.cancel()
        _, error = answers.get(timeout=ANSWER_TIMEOUT_S)
    check("cancel" in str(error).lower(), str(error))


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    error = refused(
        lambda: client.infer(task.UNKNOWN_MODEL, vllm_inputs(task.PROMPT), headers=HEADERS),
        InferenceServerException,
    )
    equal(error.status(), "StatusCode.NOT_FOUND", "status")


@tour.call("error", "temperature out of range; the stream goes on")
def _bad_value() -> None:
    with streaming() as (opened, answers):
        opened.async_stream_infer(tour.model, vllm_inputs(task.PROMPT, temperature=9))
        result, error = answers.get(timeout=ANSWER_TIMEOUT_S)
        check(result is None and "temperature" in str(error), str(error))
        opened.async_stream_infer(
            tour.model, vllm_inputs(task.PROMPT), enable_empty_final_response=True
        )
        equal(joined(_until_final(answers)), tour.plain.completion_text)


@tour.call("error", "an input that no model has")
def _bad_input() -> None:
    inputs = [tensor("pixels", "0")]
    error = refused(
        lambda: client.infer(tour.model, inputs, headers=HEADERS), InferenceServerException
    )
    equal(error.status(), "StatusCode.INVALID_ARGUMENT", "status")


@tour.limit("get_model_repository_index", "grpc.md#from-clients-of-triton-and-kserve")
def _repository() -> None:
    error = refused(
        lambda: client.get_model_repository_index(headers=HEADERS), InferenceServerException
    )
    equal(error.status(), "StatusCode.UNIMPLEMENTED", "status")


@tour.call("schema", "infer: structured_outputs with a JSON schema")
def _schema() -> None:
    sampling: Any = {
        "max_tokens": task.ANSWER_TOKENS,
        "structured_outputs": {"json": task.CITY_SCHEMA},
    }
    inputs = vllm_inputs(task.CITY_QUESTION, **sampling)
    result = client.infer(tour.model, inputs, headers=HEADERS)
    validate(json.loads(text_of(result)), task.CITY_SCHEMA)


tour.cannot("tool", "it sends a prompt as text, and KServe's protocol has no tools")
