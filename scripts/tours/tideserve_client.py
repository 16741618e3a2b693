"""tideserve's own client, from the wheels of this tree."""

import asyncio
import json
import threading
import uuid
from typing import Any

from tideserve.client import (
    AsyncClient,
    Client,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
)
from tours import task
from tours.tour import Tour, check, check_tool, equal, joined, refused, validate

tour = Tour()
client = Client(tour.grpc, api_key=tour.api_key)
GREEDY: Any = {"model": tour.model, "temperature": 0, "max_tokens": task.TOKENS}
LONG: Any = {**GREEDY, "max_tokens": task.LONG_TOKENS, "ignore_eos": True}
ANSWER: Any = {**GREEDY, "max_tokens": task.ANSWER_TOKENS}
WEATHER: Any = {**ANSWER, "tools": [task.TOOL]}


def _text(answer: Any) -> str:
    return str(answer.choices[0].message.text)


@tour.call("about", "models, tokenize, detokenize")
def _models() -> None:
    check(tour.model in [model.id for model in client.models()], "the model is not listed")
    tokens = client.tokenize(task.PROMPT, model=tour.model)
    check(task.PROMPT in client.detokenize(tokens, model=tour.model), "another text")
    chat = client.tokenize(task.MESSAGES, model=tour.model, chat=True)
    usage = client.chat(task.MESSAGES, **GREEDY).usage
    equal(len(chat), usage.prompt_tokens, "tokens")


@tour.call("unary", "chat")
def _chat() -> None:
    answer = client.chat(task.QUESTION, **GREEDY)
    equal(_text(answer), tour.plain.chat_text)
    check(answer.usage.completion_tokens > 0 and answer.id, "no usage, no id")


@tour.call("unary", "chat: a system message, parts, stop, seed")
def _messages() -> None:
    system: Any = {"role": "system", "content": "Answer briefly."}
    parts = {"role": "user", "content": [{"type": "text", "text": task.QUESTION}]}
    answer = client.chat([system, parts], **GREEDY, seed=3, stop="zzz")
    equal(_text(answer), tour.plain.chat([system, *task.MESSAGES]))


@tour.call("unary", "chat: n, logprobs, penalties, logit_bias, min_p")
def _fields() -> None:
    sampled: Any = {**GREEDY, "temperature": 0.8, "seed": 1, "min_p": 0.05, "n": 2}
    answer = client.chat(
        task.QUESTION,
        **sampled,
        logprobs=True,
        top_logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        logit_bias={17: -5},
    )
    equal([choice.index for choice in answer.choices], [0, 1], "indices")
    for choice in answer.choices:
        equal(len(choice.logprobs), len(choice.token_ids), "logprobs")


@tour.call("unary", "complete, two prompts")
def _complete() -> None:
    prompts: Any = [task.PROMPT, client.tokenize(task.PROMPT, model=tour.model)]
    answer = client.complete(prompts, **GREEDY)
    texts = [choice.text for choice in answer.choices]
    equal(texts, [tour.plain.completion_text] * 2, "texts")


@tour.call("unary", "AsyncClient, four at once")
async def _at_once() -> None:
    async with AsyncClient(tour.grpc, api_key=tour.api_key) as opened:
        calls = (opened.chat(task.QUESTION, **GREEDY) for _ in range(4))
        for answer in await asyncio.gather(*calls):
            check(_text(answer), "an empty answer")


@tour.call("stream", "stream_chat")
def _stream() -> None:
    with client.stream_chat(task.QUESTION, **GREEDY) as stream:
        pieces = list(stream)
    equal(joined([piece.text for piece in pieces]), tour.plain.chat_text)
    check(pieces[-1].usage.completion_tokens > 0, "no usage at the end")


@tour.call("stream", "stream_complete")
def _stream_text() -> None:
    with client.stream_complete(task.PROMPT, **GREEDY) as stream:
        equal(joined([piece.text for piece in stream]), tour.plain.completion_text)


@tour.call("stream", "AsyncClient.stream_chat")
async def _stream_async() -> None:
    async with (
        AsyncClient(tour.grpc, api_key=tour.api_key) as opened,
        opened.stream_chat(task.QUESTION, **GREEDY) as stream,
    ):
        texts = [piece.text async for piece in stream]
    equal(joined(texts), tour.plain.chat_text)


@tour.call("cancel", "a stream that is left")
def _leave() -> None:
    with tour.given_up(), client.stream_chat(task.QUESTION, **LONG) as stream:
        for _, _piece in zip(range(4), stream, strict=False):
            pass


@tour.call("cancel", "cancel, by the id of the response")
def _cancel_by_id() -> None:
    with tour.given_up(), client.stream_chat(task.QUESTION, **LONG) as stream:
        next(stream)
        client.cancel(stream.id)
        refused(lambda: list(stream), Exception)
        client.cancel(stream.id)  # twice is no error


@tour.call("cancel", "cancel, by the id that was chosen, of a unary call")
def _cancel_by_choice() -> None:
    ended: list[BaseException] = []
    chosen = f"tour-{uuid.uuid4()}"

    def ask() -> None:
        try:
            client.chat(task.QUESTION, **LONG, request_id=chosen)
        except Exception as error:  # noqa: BLE001 - checked below
            ended.append(error)

    with tour.given_up():
        before = tour.plain.output_tokens()
        asking = threading.Thread(target=ask)
        asking.start()
        tour.plain.wait_for_output(before)
        client.cancel(chosen)
        asking.join()
    equal([type(error).__name__ for error in ended], ["Cancelled"], "errors")


@tour.call("cancel", "a task of AsyncClient that is cancelled")
async def _cancel() -> None:
    async with AsyncClient(tour.grpc, api_key=tour.api_key) as opened:
        await tour.cancelled(opened.chat(task.QUESTION, **LONG))


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    asked = {**GREEDY, "model": task.UNKNOWN_MODEL}
    error = refused(lambda: client.chat(task.QUESTION, **asked), ModelNotFound)
    check(error.request_id, "no request id")


@tour.call("error", "temperature out of range, streamed")
def _bad_value() -> None:
    asked = {**GREEDY, "temperature": 9}
    error = refused(lambda: list(client.stream_chat(task.QUESTION, **asked)), InvalidRequest)
    equal(error.field, "temperature", "field")


@tour.call("error", "prompt beyond the context")
def _too_long() -> None:
    refused(lambda: client.complete("word " * 20_000, **GREEDY), ContextLengthExceeded)


@tour.call("schema", "json_schema")
def _schema() -> None:
    answer = client.chat(task.CITY_QUESTION, **ANSWER, json_schema=task.CITY_SCHEMA)
    validate(json.loads(_text(answer)), task.CITY_SCHEMA)


@tour.call("schema", "regex and choices, streamed")
def _regex() -> None:
    with client.stream_complete(task.PROMPT, **ANSWER, regex=r" [A-Z][a-z]{2,8}\.") as stream:
        text = joined([piece.text for piece in stream])
    check(text.startswith(" ") and text.endswith("."), text)
    answer = client.complete("The capital is", **ANSWER, choices=[" Paris", " London"])
    check(answer.choices[0].text in (" Paris", " London"), answer.choices[0].text)


@tour.call("tool", "tool_choice names a tool, and its result is sent back")
def _named() -> None:
    message = client.chat(task.TOOL_MESSAGES, **WEATHER, tool_choice=task.TOOL_CHOICE)
    told = message.choices[0].message
    (call,) = told.tool_calls
    check_tool(call.name, call.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": task.TOOL_RESULT}
    again = client.chat([*task.TOOL_MESSAGES, told, result], **WEATHER)
    check(again.choices[0].finish_reason, "no answer")


@tour.call("tool", "tool_choice required, streamed")
def _required() -> None:
    # Without the second field so small a model calls until it is cut.
    asked: Any = {**WEATHER, "tool_choice": "required", "parallel_tool_calls": False}
    with client.stream_chat(task.TOOL_MESSAGES, **asked) as stream:
        deltas = [delta for piece in stream for delta in piece.tool_calls]
    equal({delta.index for delta in deltas}, {0}, "indices")
    arguments = joined([delta.arguments for delta in deltas])
    check_tool(joined([delta.name for delta in deltas]), arguments)
