"""The official OpenAI client, in two major versions."""

import asyncio
import json
from typing import Any, Literal

import openai
import pydantic
import pytest
import support as s

HOW: Any = {"base_url": f"{s.URL}/v1", "api_key": s.API_KEY, "max_retries": 0}
client = openai.OpenAI(**HOW)
create: Any = client.chat.completions.create
respond: Any = client.responses.create
GREEDY: Any = {"model": s.MODEL, "temperature": 0, "max_tokens": s.TOKENS}
CHAT: Any = {**GREEDY, "messages": s.MESSAGES}
TEXT: Any = {**GREEDY, "prompt": s.PROMPT}
LONG: Any = {**CHAT, "max_tokens": s.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
CITY: Any = {**GREEDY, "max_tokens": s.ANSWER_TOKENS, "messages": s.CITY_MESSAGES}
TOOLS: Any = {**CITY, "messages": s.TOOL_MESSAGES, "tools": [s.TOOL]}
RESPONSE: Any = {"model": s.MODEL, "input": s.QUESTION, "temperature": 0, "store": False}


class City(pydantic.BaseModel):
    city: Literal["Paris", "London", "Rome"]
    millions: int = pydantic.Field(ge=0, le=99)


def test_models() -> None:
    assert s.MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(s.MODEL).id == s.MODEL


def test_chat() -> None:
    answer = create(**CHAT)
    assert answer.choices[0].message.content == s.chat_text()
    assert answer.usage.completion_tokens <= s.TOKENS


def test_a_seed_repeats_a_sampled_chat() -> None:
    sampled: Any = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "stop": ["zzz"], "user": "user"}
    asked = {**CHAT, **sampled, "metadata": {"key": "1"}, "store": False}
    asked["max_completion_tokens"] = asked.pop("max_tokens")
    first, again = create(**asked), create(**asked)
    assert first.choices[0].message.content == again.choices[0].message.content


def test_penalties_and_logit_bias() -> None:
    create(**CHAT, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"17": -100})


def test_two_choices() -> None:
    answer = create(**{**CHAT, "temperature": 0.8, "seed": 1}, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_logprobs() -> None:
    choice = create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    tokens = s.joined(entry.token for entry in choice.logprobs.content)
    assert tokens.startswith(choice.message.content)
    assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)


def test_text_parts() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": s.QUESTION}]}]
    answer = create(**{**CHAT, "messages": parts})
    assert answer.choices[0].message.content == s.chat_text()


def test_completion() -> None:
    assert client.completions.create(**TEXT).choices[0].text == s.completion_text()


def test_echo_and_logprobs_of_a_completion() -> None:
    choice = client.completions.create(**TEXT, echo=True, logprobs=1).choices[0]
    assert choice.text == s.PROMPT + s.completion_text()
    assert choice.logprobs and choice.logprobs.token_logprobs


async def test_four_at_once() -> None:
    async with openai.AsyncOpenAI(**HOW) as opened:
        answers = await asyncio.gather(*(opened.chat.completions.create(**CHAT) for _ in range(4)))
    assert all(answer.choices[0].message.content for answer in answers)


def test_response() -> None:
    assert respond(**RESPONSE, max_output_tokens=s.TOKENS).output_text == s.chat_text()


def test_raw_response_has_a_request_id() -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    assert raw.headers.get("x-request-id")
    assert raw.parse().choices[0].message.content == s.chat_text()


def test_stream() -> None:
    chunks = list(create(**CHAT, stream=True))
    assert s.joined(c.choices[0].delta.content for c in chunks if c.choices) == s.chat_text()
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_stream_with_usage() -> None:
    chunks = list(create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens > 0


def test_stream_events() -> None:
    with client.chat.completions.stream(**CHAT) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert s.joined(texts) == whole.choices[0].message.content == s.chat_text()


def test_stream_of_a_completion() -> None:
    chunks = client.completions.create(**TEXT, stream=True)
    assert s.joined(c.choices[0].text for c in chunks if c.choices) == s.completion_text()


def test_stream_of_a_response() -> None:
    events = list(respond(**RESPONSE, max_output_tokens=s.TOKENS, stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert s.joined(texts) == s.chat_text()
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_a_closed_stream_is_cancelled() -> None:
    with s.given_up():
        stream = create(**LONG, stream=True)
        for _, _chunk in zip(range(4), stream, strict=False):
            pass
        stream.close()


async def test_a_cancelled_task_is_cancelled() -> None:
    async with openai.AsyncOpenAI(**HOW) as opened:
        await s.cancelled(opened.chat.completions.create(**LONG))


@pytest.mark.parametrize(
    ("asked", "kind", "field", "value"),
    [
        ({"model": s.UNKNOWN_MODEL}, openai.NotFoundError, "code", "model_not_found"),
        ({"temperature": 9}, openai.BadRequestError, "param", "temperature"),
        (
            {"messages": [{"role": "user", "content": s.TOO_LONG}], "stream": True},
            *(openai.BadRequestError, "code", "context_length_exceeded"),
        ),
    ],
)
def test_errors(asked: Any, kind: type[Exception], field: str, value: str) -> None:
    with pytest.raises(kind) as raised:
        create(**{**CHAT, **asked})
    assert getattr(raised.value, field) == value


def test_refused_by_decision() -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model=s.MODEL, input="tide")
    assert raised.value.code == "unsupported"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(openai.BadRequestError):
        create(**{**CHAT, "messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(openai.BadRequestError) as raised:
        respond(**RESPONSE, previous_response_id="resp_1")
    assert raised.value.param == "previous_response_id"


def test_schema() -> None:
    choice = create(**CITY, response_format=s.CITY_FORM).choices[0]
    assert choice.finish_reason == "stop"
    s.check_city(choice.message.content)


def test_pydantic_model() -> None:
    answer = client.beta.chat.completions.parse(**CITY, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(**CITY, response_format=City) as stream:
        whole = stream.get_final_completion()
    assert isinstance(whole.choices[0].message.parsed, City)


def test_json_object() -> None:
    choice = create(**CITY, response_format={"type": "json_object"}).choices[0]
    assert choice.message.content.startswith("{")


def test_pydantic_model_of_a_response() -> None:
    asked: Any = {**RESPONSE, "input": s.CITY_QUESTION, "max_output_tokens": s.ANSWER_TOKENS}
    assert isinstance(client.responses.parse(**asked, text_format=City).output_parsed, City)


def test_a_named_tool_and_its_result() -> None:
    message = create(**TOOLS, tool_choice=s.TOOL_CHOICE).choices[0].message
    (call,) = message.tool_calls
    s.check_tool(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": s.TOOL_RESULT}
    history = [*s.TOOL_MESSAGES, message.model_dump(exclude_none=True), result]
    assert create(**{**TOOLS, "messages": history}).choices[0].finish_reason


def test_a_required_tool_streamed() -> None:
    # Without the last field a model this small calls until it is truncated.
    asked: Any = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked) as stream:
        call = (stream.get_final_completion().choices[0].message.tool_calls or [])[0]
    s.check_tool(call.function.name, call.function.arguments)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tool_choice(choice: str) -> None:
    answer = create(**TOOLS, tool_choice=choice).choices[0]
    assert answer.finish_reason in ("stop", "length", "tool_calls")


def test_a_named_tool_of_a_response() -> None:
    asked = {**RESPONSE, "input": s.TOOL_QUESTION, "max_output_tokens": s.ANSWER_TOKENS}
    tool = {"type": "function", "strict": True, **s.FUNCTION}
    choice = {"type": "function", "name": s.TOOL_NAME}
    output = respond(**asked, tools=[tool], tool_choice=choice).output
    (call,) = (item for item in output if item.type == "function_call")
    s.check_tool(call.name, json.loads(call.arguments))
