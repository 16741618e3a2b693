"""The KServe project's client over gRPC.

Its parameters are whole numbers, booleans and text, so that sampling with fractions goes into the
tensor `sampling_parameters`, as JSON.
"""

import asyncio
import json
from typing import Any

import grpc
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

from tours import task
from tours.tour import Tour, check, equal, joined, refused_later, validate

tour = Tour()
HEADERS = (("authorization", f"Bearer {tour.api_key}"),)
GREEDY: Any = {"temperature": 0, "max_tokens": task.TOKENS}
LONG: Any = {"temperature": 0, "max_tokens": task.LONG_TOKENS, "ignore_eos": True}


def opened(**options: Any) -> Any:
    """A client, to be used in one event loop."""
    return InferenceGRPCClient(tour.grpc, retries=0, **options)


def raw(name: str, text: str) -> Any:
    """A tensor of one text."""
    made = InferInput(name, [1], "BYTES")
    made.set_data_from_numpy(np.array([text.encode()], object))
    return made


def asked(prompt: str, model: str = tour.model, tensor: bool = False, **sampling: Any) -> Any:
    """A request; its sampling in the parameters or in a tensor."""
    chosen = {**GREEDY, **sampling}
    inputs = [raw("text_input", prompt)]
    if tensor:
        return InferRequest(model, [*inputs, raw("sampling_parameters", json.dumps(chosen))])
    return InferRequest(model, inputs, parameters=chosen)


def text_of(response: Any) -> str:
    """The text of a response."""
    (output,) = [one for one in response.outputs if one.name == "text_output"]
    values = output.as_numpy().reshape(-1)
    return joined([one.decode() if isinstance(one, bytes) else str(one) for one in values])


async def ask(prompt: str, **more: Any) -> str:
    """The text that follows."""
    async with opened() as client:
        return text_of(await client.infer(asked(prompt, **more), headers=HEADERS))


async def code_of(request: Any, **more: Any) -> Any:
    """The status that a request fails with."""
    async with opened() as client:
        call = client.infer(request, headers=HEADERS, **more)
        return (await refused_later(call, grpc.aio.AioRpcError)).code()


@tour.call("about", "is_server_live, is_server_ready")
async def _server() -> None:
    async with opened() as client:
        check(await client.is_server_live(headers=HEADERS), "not live")
        check(await client.is_server_ready(headers=HEADERS), "not ready")


@tour.call("about", "is_model_ready")
async def _model() -> None:
    async with opened() as client:
        check(await client.is_model_ready(tour.model, headers=HEADERS), "not ready")
        there = await client.is_model_ready(task.UNKNOWN_MODEL, headers=HEADERS)
        check(not there, "a model too many")


@tour.call("unary", "infer, raw contents")
async def _raw() -> None:
    equal(await ask(task.PROMPT), tour.plain.completion_text)


@tour.call("unary", "infer, typed contents")
async def _typed() -> None:
    text = InferInput("text_input", [1], "BYTES", data=[task.PROMPT.encode()])
    async with opened() as client:
        request = InferRequest(tour.model, [text], parameters=GREEDY)
        response = await client.infer(request, headers=HEADERS)
    equal(text_of(response), tour.plain.completion_text)


@tour.call("unary", "infer: sampling in a tensor")
async def _sampling() -> None:
    sampled: Any = {"tensor": True, "temperature": 0.8, "seed": 5, "top_p": 0.9, "top_k": 20}
    equal(await ask(task.PROMPT, **sampled), await ask(task.PROMPT, **sampled))


@tour.call("unary", "infer, four at once")
async def _at_once() -> None:
    for text in await asyncio.gather(*(ask(task.PROMPT) for _ in range(4))):
        check(text, "an empty answer")


@tour.call("unary", "infer with a deadline")
async def _deadline() -> None:
    async with opened() as client:
        response = await client.infer(asked(task.PROMPT), timeout=60.0, headers=HEADERS)
    equal(text_of(response), tour.plain.completion_text)


tour.cannot("stream", "it has ModelInfer only; ModelStreamInfer is Triton's extension")


@tour.call("cancel", "infer whose task is cancelled")
async def _cancel() -> None:
    async with opened() as client:
        await tour.cancelled(client.infer(asked(task.PROMPT, **LONG), headers=HEADERS))


@tour.call("cancel", "infer whose deadline is over")
async def _too_late() -> None:
    with tour.given_up():
        code = await code_of(asked(task.PROMPT, **LONG), timeout=1.0)
    equal(code, grpc.StatusCode.DEADLINE_EXCEEDED, "status")


@tour.call("error", "unknown model")
async def _unknown_model() -> None:
    code = await code_of(asked(task.PROMPT, model=task.UNKNOWN_MODEL))
    equal(code, grpc.StatusCode.NOT_FOUND, "status")


@tour.call("error", "temperature out of range")
async def _bad_value() -> None:
    code = await code_of(asked(task.PROMPT, temperature=9))
    equal(code, grpc.StatusCode.INVALID_ARGUMENT, "status")


@tour.call("schema", "infer: a JSON schema in the parameters")
async def _schema() -> None:
    schema = json.dumps({"json": task.CITY_SCHEMA})
    text = await ask(task.CITY_QUESTION, max_tokens=task.ANSWER_TOKENS, structured_outputs=schema)
    validate(json.loads(text), task.CITY_SCHEMA)


tour.cannot("tool", "it sends a prompt as text, and KServe's protocol has no tools")
