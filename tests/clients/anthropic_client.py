"""Anthropic's official client, which speaks the Messages API.

Since version 2 it lacks `temperature`, so greedy calls send it as an extra body field.
"""

import asyncio
from typing import Any, Literal

import anthropic
import pydantic
import pytest
import support as s

HOW: Any = {"base_url": s.URL, "api_key": s.API_KEY, "max_retries": 0}
client = anthropic.Anthropic(**HOW)
create: Any = client.messages.create
GREEDY: Any = {"model": s.MODEL, "max_tokens": s.TOKENS, "extra_body": {"temperature": 0}}
ASK: Any = {**GREEDY, "messages": s.MESSAGES}
LONG: Any = {**ASK, "max_tokens": s.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
CITY: Any = {**GREEDY, "max_tokens": s.ANSWER_TOKENS, "messages": s.CITY_MESSAGES}
TOOL = {"name": s.TOOL_NAME, "description": s.TOOL_DESCRIPTION, "input_schema": s.TOOL_SCHEMA}
TOOLS: Any = {**CITY, "messages": s.TOOL_MESSAGES, "tools": [TOOL]}


class City(pydantic.BaseModel):
    city: Literal["Paris", "London", "Rome"]
    millions: int


def text_of(message: Any) -> str:
    return s.joined(block.text for block in message.content if block.type == "text")


def test_models() -> None:
    assert s.MODEL in [model.id for model in client.models.list()]


def test_count_tokens() -> None:
    counted = client.messages.count_tokens(model=s.MODEL, messages=s.MESSAGES)
    usage = create(**ASK).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_create() -> None:
    message = create(**ASK)
    assert text_of(message) == s.chat_text()
    assert message.stop_reason in ("end_turn", "max_tokens")


def test_system() -> None:
    message = create(**ASK, system="Answer briefly.")
    assert text_of(message) == s.chat([s.BRIEFLY, *s.MESSAGES])


def test_blocks_with_cache_control() -> None:
    block = {"type": "text", "text": s.QUESTION, "cache_control": {"type": "ephemeral"}}
    asked = {**GREEDY, "messages": [{"role": "user", "content": [block]}]}
    assert text_of(create(**asked, metadata={"user_id": "user"})) == s.chat_text()


def test_stop_sequence() -> None:
    word = s.chat_text().split()[1]
    message = create(**ASK, stop_sequences=[word])
    assert message.stop_reason == "stop_sequence"
    assert text_of(message) == s.chat_text().partition(word)[0]


async def test_four_at_once() -> None:
    async with anthropic.AsyncAnthropic(**HOW) as opened:
        answers = await asyncio.gather(*(opened.messages.create(**ASK) for _ in range(4)))
    assert all(map(text_of, answers))


def test_stream() -> None:
    with client.messages.stream(**ASK) as stream:
        texts = list(stream.text_stream)
        whole = stream.get_final_message()
    assert s.joined(texts) == text_of(whole) == s.chat_text()
    assert whole.usage.output_tokens > 0


def test_events() -> None:
    kinds = [event.type for event in create(**ASK, stream=True)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert {"content_block_delta", "message_delta"} <= set(kinds)


def test_a_closed_stream_is_cancelled() -> None:
    with s.given_up(), client.messages.stream(**LONG) as stream:
        for _, _piece in zip(range(4), stream.text_stream, strict=False):
            pass


async def test_a_cancelled_task_is_cancelled() -> None:
    async with anthropic.AsyncAnthropic(**HOW) as opened:
        await s.cancelled(opened.messages.create(**LONG))


IMAGE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
CONTENT = [{"type": "image", "source": IMAGE}]
NOT_FOUND = (anthropic.NotFoundError, "not_found_error")
INVALID = (anthropic.BadRequestError, "invalid_request_error")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"model": s.UNKNOWN_MODEL}, NOT_FOUND),
        ({"extra_body": {"temperature": 9}}, INVALID),
        ({"max_tokens": -1, "stream": True}, INVALID),
        ({"messages": [{"role": "user", "content": CONTENT}]}, INVALID),  # by decision
    ],
)
def test_errors(asked: Any, wanted: tuple[type[anthropic.APIStatusError], str]) -> None:
    with pytest.raises(wanted[0]) as raised:
        create(**{**ASK, **asked})
    body: Any = raised.value.body
    assert body["error"]["type"] == wanted[1]


def test_schema() -> None:
    form = {"format": {"type": "json_schema", "schema": s.CITY_SCHEMA}}
    message = create(**CITY, output_config=form)
    assert message.stop_reason == "end_turn"
    s.check_city(text_of(message))


def test_pydantic_model() -> None:
    message = client.messages.parse(**CITY, output_format=City)
    assert isinstance(message.parsed_output, City)


def tool_use(message: Any) -> Any:
    (use,) = (block for block in message.content if block.type == "tool_use")
    s.check_tool(use.name, use.input)
    assert message.stop_reason == "tool_use"
    return use


def test_a_named_tool_and_its_result() -> None:
    message = create(**TOOLS, tool_choice={"type": "tool", "name": s.TOOL_NAME})
    use = tool_use(message)
    block = {"type": "tool_result", "tool_use_id": use.id, "content": s.TOOL_RESULT}
    call = {"role": "assistant", "content": message.content}
    history = [*s.TOOL_MESSAGES, call, {"role": "user", "content": [block]}]
    assert create(**{**TOOLS, "messages": history}).stop_reason


def test_any_tool_streamed() -> None:
    # Without the second field a model this small calls until it is truncated.
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**TOOLS, tool_choice=choice) as stream:
        tool_use(stream.get_final_message())
