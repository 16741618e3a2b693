"""Anthropic's official client, which speaks the Messages API.

From version 2 on it has no `temperature` of its own, so that greedy calls send it in the body.
"""

import asyncio
import json
from typing import Any, Literal

import anthropic
import pydantic

from tours import task
from tours.tour import Tour, check, check_tool, equal, joined, refused, validate

tour = Tour()
options: Any = {"base_url": tour.url, "api_key": tour.api_key, "max_retries": 0}
client = anthropic.Anthropic(**options)
GREEDY: Any = {
    "model": tour.model,
    "max_tokens": task.TOKENS,
    "extra_body": {"temperature": 0},
}
ASK: Any = {**GREEDY, "messages": task.MESSAGES}
LONG: Any = {**ASK, "max_tokens": task.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
CITY: Any = {**GREEDY, "max_tokens": task.ANSWER_TOKENS, "messages": task.CITY_MESSAGES}
TOOLS: Any = [
    {
        "name": task.TOOL_NAME,
        "description": task.TOOL_DESCRIPTION,
        "input_schema": task.TOOL_SCHEMA,
    }
]
WEATHER: Any = {
    **GREEDY,
    "max_tokens": task.ANSWER_TOKENS,
    "messages": task.TOOL_MESSAGES,
    "tools": TOOLS,
}
NAMED: Any = {"type": "tool", "name": task.TOOL_NAME}


class City(pydantic.BaseModel):
    """task.CITY_SCHEMA as people write it for this client."""

    city: Literal["Paris", "London", "Rome"]
    millions: int


def _text(message: Any) -> str:
    return joined([block.text for block in message.content if block.type == "text"])


@tour.call("about", "models.list")
def _models() -> None:
    check(tour.model in [model.id for model in client.models.list()], "the model is not listed")


@tour.call("about", "messages.count_tokens")
def _count() -> None:
    counted = client.messages.count_tokens(model=tour.model, messages=task.MESSAGES)
    usage = client.messages.create(**ASK).usage
    equal(counted.input_tokens, usage.input_tokens, "tokens")


@tour.call("unary", "messages.create")
def _create() -> None:
    message = client.messages.create(**ASK)
    equal(_text(message), tour.plain.chat_text)
    check(message.stop_reason in ("end_turn", "max_tokens"), str(message.stop_reason))


@tour.call("unary", "messages.create: system")
def _system() -> None:
    system: Any = {"role": "system", "content": "Answer briefly."}
    message = client.messages.create(**ASK, system="Answer briefly.")
    equal(_text(message), tour.plain.chat([system, *task.MESSAGES]))


@tour.call("unary", "messages.create: blocks with cache_control, metadata")
def _blocks() -> None:
    block: Any = {
        "type": "text",
        "text": task.QUESTION,
        "cache_control": {"type": "ephemeral"},
    }
    asked: Any = {**GREEDY, "messages": [{"role": "user", "content": [block]}]}
    message = client.messages.create(**asked, metadata={"user_id": "tour"})
    equal(_text(message), tour.plain.chat_text)


@tour.call("unary", "messages.create: stop_sequences")
def _stop() -> None:
    word = tour.plain.chat_text.split()[1]
    message = client.messages.create(**ASK, stop_sequences=[word])
    equal(message.stop_reason, "stop_sequence", "stop_reason")
    equal(_text(message), tour.plain.chat_text.partition(word)[0])


@tour.call("unary", "AsyncAnthropic, four at once")
async def _at_once() -> None:
    async with anthropic.AsyncAnthropic(**options) as opened:
        answers = await asyncio.gather(*(opened.messages.create(**ASK) for _ in range(4)))
    for answer in answers:
        check(_text(answer), "an empty answer")


@tour.call("stream", "messages.stream")
def _stream() -> None:
    with client.messages.stream(**ASK) as stream:
        texts = list(stream.text_stream)
        whole = stream.get_final_message()
    equal(joined(texts), tour.plain.chat_text)
    equal(_text(whole), tour.plain.chat_text)
    check(whole.usage.output_tokens > 0, "no usage")


@tour.call("stream", "messages.create: raw events")
def _events() -> None:
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    equal((kinds[0], kinds[-1]), ("message_start", "message_stop"), "first and last event")
    check("content_block_delta" in kinds and "message_delta" in kinds, str(kinds))


@tour.call("cancel", "a stream that is closed")
def _close() -> None:
    with tour.given_up(), client.messages.stream(**LONG) as stream:
        for _, _text_piece in zip(range(4), stream.text_stream, strict=False):
            pass


@tour.call("cancel", "a unary call whose task is cancelled")
async def _cancel() -> None:
    async with anthropic.AsyncAnthropic(**options) as opened:
        await tour.cancelled(opened.messages.create(**LONG))


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    asked = {**ASK, "model": task.UNKNOWN_MODEL}
    error = refused(lambda: client.messages.create(**asked), anthropic.NotFoundError)
    equal(error.body["error"]["type"], "not_found_error", "type")


@tour.call("error", "temperature out of range")
def _bad_value() -> None:
    asked = {**ASK, "extra_body": {"temperature": 9}}
    error = refused(lambda: client.messages.create(**asked), anthropic.BadRequestError)
    equal(error.body["error"]["type"], "invalid_request_error", "type")


@tour.call("error", "max_tokens below 0, streamed")
def _bad_limit() -> None:
    asked = {**ASK, "max_tokens": -1, "stream": True}
    refused(lambda: client.messages.create(**asked), anthropic.BadRequestError)


@tour.limit("messages.create with an image", "api.md#messages")
def _image() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    asked: Any = {
        **ASK,
        "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
    }
    error = refused(lambda: client.messages.create(**asked), anthropic.BadRequestError)
    equal(error.body["error"]["type"], "invalid_request_error", "type")


@tour.call("schema", "output_config: json_schema")
def _schema() -> None:
    form: Any = {"format": {"type": "json_schema", "schema": task.CITY_SCHEMA}}
    message = client.messages.create(**CITY, output_config=form)
    equal(message.stop_reason, "end_turn", "stop_reason")
    validate(json.loads(_text(message)), task.CITY_SCHEMA)


@tour.call("schema", "messages.parse with a pydantic model")
def _parse() -> None:
    message = client.messages.parse(**CITY, output_format=City)
    check(isinstance(message.parsed_output, City), "nothing parsed")


def _check_use(message: Any) -> Any:
    (use,) = (block for block in message.content if block.type == "tool_use")
    check_tool(use.name, use.input)
    equal(message.stop_reason, "tool_use", "stop_reason")
    return use


@tour.call("tool", "tool_choice names a tool, and its result is sent back")
def _named() -> None:
    message = client.messages.create(**WEATHER, tool_choice=NAMED)
    use = _check_use(message)
    block = {"type": "tool_result", "tool_use_id": use.id, "content": task.TOOL_RESULT}
    result = {"role": "user", "content": [block]}
    told = {"role": "assistant", "content": message.content}
    asked: Any = {**WEATHER, "messages": [*task.TOOL_MESSAGES, told, result]}
    check(client.messages.create(**asked).stop_reason, "no answer")


@tour.call("tool", "tool_choice any, streamed")
def _any() -> None:
    # Without the second field so small a model calls until it is cut.
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**WEATHER, tool_choice=choice) as stream:
        _check_use(stream.get_final_message())
