"""The official OpenAI client; the tour of two of its major versions."""

import asyncio
import json
from typing import Any

import openai

from tours import task
from tours.city import City
from tours.tour import Tour, check, check_tool, equal, joined, refused, validate

tour = Tour()
options: Any = {"base_url": f"{tour.url}/v1", "api_key": tour.api_key, "max_retries": 0}
client = openai.OpenAI(**options)
GREEDY: Any = {"model": tour.model, "temperature": 0, "max_tokens": task.TOKENS}
CHAT: Any = {**GREEDY, "messages": task.MESSAGES}
TEXT: Any = {**GREEDY, "prompt": task.PROMPT}
LONG: Any = {**CHAT, "max_tokens": task.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
ANSWER: Any = {"model": tour.model, "temperature": 0, "max_tokens": task.ANSWER_TOKENS}
WEATHER: Any = {**ANSWER, "messages": task.TOOL_MESSAGES, "tools": [task.TOOL]}


@tour.call("about", "models.list, models.retrieve")
def _models() -> None:
    check(tour.model in [model.id for model in client.models.list()], "the model is not listed")
    equal(client.models.retrieve(tour.model).id, tour.model)


@tour.call("unary", "chat.completions.create")
def _chat() -> None:
    answer = client.chat.completions.create(**CHAT)
    equal(answer.choices[0].message.content, tour.plain.chat_text)
    check(answer.usage and answer.usage.completion_tokens <= task.TOKENS, "no usage")


@tour.call("unary", "chat.completions.create: max_completion_tokens, seed, stop, user, metadata")
def _fields() -> None:
    sampled: Any = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "stop": ["zzz"], "user": "tour"}
    asked = {**CHAT, **sampled, "metadata": {"tour": "1"}, "store": False}
    asked["max_completion_tokens"] = asked.pop("max_tokens")
    first = client.chat.completions.create(**asked)
    again = client.chat.completions.create(**asked)
    equal(first.choices[0].message.content, again.choices[0].message.content)


@tour.call("unary", "chat.completions.create: penalties, logit_bias")
def _penalties() -> None:
    asked: Any = {**CHAT, "presence_penalty": 0.5, "frequency_penalty": 0.5}
    client.chat.completions.create(**asked, logit_bias={"17": -100})


@tour.call("unary", "chat.completions.create: n=2")
def _choices() -> None:
    answer = client.chat.completions.create(**{**CHAT, "temperature": 0.8, "seed": 1}, n=2)
    equal([choice.index for choice in answer.choices], [0, 1], "indices")


@tour.call("unary", "chat.completions.create: logprobs, top_logprobs")
def _logprobs() -> None:
    choice = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3).choices[0]
    check(choice.logprobs and choice.logprobs.content, "no logprobs")
    tokens = [entry.token for entry in choice.logprobs.content]
    check(joined(tokens).startswith(str(choice.message.content)), f"other tokens: {tokens}")
    check(all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content), "not 3")


@tour.call("unary", "chat.completions.create: text parts")
def _parts() -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": task.QUESTION}]}]
    answer = client.chat.completions.create(**{**CHAT, "messages": parts})
    equal(answer.choices[0].message.content, tour.plain.chat_text)


@tour.call("unary", "completions.create")
def _complete() -> None:
    equal(client.completions.create(**TEXT).choices[0].text, tour.plain.completion_text)


@tour.call("unary", "completions.create: echo, logprobs")
def _echo() -> None:
    choice = client.completions.create(**TEXT, echo=True, logprobs=1).choices[0]
    equal(choice.text, task.PROMPT + tour.plain.completion_text)
    check(choice.logprobs and choice.logprobs.token_logprobs, "no logprobs")


@tour.call("unary", "AsyncOpenAI, four at once")
async def _at_once() -> None:
    async with openai.AsyncOpenAI(**options) as opened:
        calls = (opened.chat.completions.create(**CHAT) for _ in range(4))
        answers = await asyncio.gather(*calls)
    for answer in answers:
        check(answer.choices[0].message.content, "an empty answer")


@tour.call("unary", "responses.create")
def _respond() -> None:
    answer = client.responses.create(
        model=tour.model,
        input=task.QUESTION,
        temperature=0,
        max_output_tokens=task.TOKENS,
        store=False,
    )
    equal(answer.output_text, tour.plain.chat_text)


@tour.call("unary", "with_raw_response: request id")
def _raw() -> None:
    raw = client.chat.completions.with_raw_response.create(**CHAT)
    check(raw.headers.get("x-request-id"), "no x-request-id")
    equal(raw.parse().choices[0].message.content, tour.plain.chat_text)


@tour.call("stream", "chat.completions.create")
def _stream() -> None:
    chunks = list(client.chat.completions.create(**CHAT, stream=True))
    equal(joined([c.choices[0].delta.content for c in chunks if c.choices]), tour.plain.chat_text)
    check(chunks[-1].choices[0].finish_reason in ("stop", "length"), "no finish_reason")


@tour.call("stream", "chat.completions.create: include_usage")
def _stream_usage() -> None:
    asked: Any = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    check(chunks[-1].usage and chunks[-1].usage.prompt_tokens > 0, "no usage at the end")


@tour.call("stream", "chat.completions.stream: events")
def _stream_events() -> None:
    with client.chat.completions.stream(**CHAT) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    equal(joined(texts), tour.plain.chat_text)
    equal(whole.choices[0].message.content, tour.plain.chat_text)


@tour.call("stream", "completions.create")
def _stream_text() -> None:
    chunks = client.completions.create(**TEXT, stream=True)
    equal(joined([c.choices[0].text for c in chunks if c.choices]), tour.plain.completion_text)


@tour.call("stream", "responses.create")
def _stream_response() -> None:
    asked: Any = {"model": tour.model, "input": task.QUESTION, "temperature": 0, "store": False}
    events = list(client.responses.create(**asked, max_output_tokens=task.TOKENS, stream=True))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    equal(joined(texts), tour.plain.chat_text)
    check(events[-1].type in ("response.completed", "response.incomplete"), events[-1].type)


@tour.call("cancel", "a stream that is closed")
def _close() -> None:
    with tour.given_up():
        stream = client.chat.completions.create(**LONG, stream=True)
        for _, _chunk in zip(range(4), stream, strict=False):
            pass
        stream.close()


@tour.call("cancel", "a unary call whose task is cancelled")
async def _cancel() -> None:
    async with openai.AsyncOpenAI(**options) as opened:
        await tour.cancelled(opened.chat.completions.create(**LONG))


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    asked = {**CHAT, "model": task.UNKNOWN_MODEL}
    error = refused(lambda: client.chat.completions.create(**asked), openai.NotFoundError)
    equal(error.code, "model_not_found", "code")


@tour.call("error", "temperature out of range")
def _bad_value() -> None:
    asked = {**CHAT, "temperature": 9}
    error = refused(lambda: client.chat.completions.create(**asked), openai.BadRequestError)
    equal(error.param, "temperature", "param")


@tour.call("error", "prompt beyond the context, streamed")
def _too_long() -> None:
    asked: Any = {**CHAT, "messages": [{"role": "user", "content": "word " * 20_000}]}
    error = refused(
        lambda: client.chat.completions.create(**asked, stream=True), openai.BadRequestError
    )
    equal(error.code, "context_length_exceeded", "code")


@tour.limit("embeddings.create", "api.md#embeddings")
def _embed() -> None:
    error = refused(
        lambda: client.embeddings.create(model=tour.model, input="tide"), openai.BadRequestError
    )
    equal(error.code, "unsupported", "code")


@tour.limit("chat.completions.create with an image", "api.md#chat")
def _image() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    asked: Any = {**CHAT, "messages": [{"role": "user", "content": [image]}]}
    refused(lambda: client.chat.completions.create(**asked), openai.BadRequestError)


@tour.limit("responses.create with previous_response_id", "api.md#responses")
def _previous() -> None:
    asked: Any = {"model": tour.model, "input": task.QUESTION, "previous_response_id": "resp_1"}
    error = refused(lambda: client.responses.create(**asked), openai.BadRequestError)
    equal(error.param, "previous_response_id", "param")


@tour.call("schema", "response_format json_schema")
def _schema() -> None:
    asked: Any = {**ANSWER, "messages": task.CITY_MESSAGES, "response_format": task.CITY_FORM}
    choice = client.chat.completions.create(**asked).choices[0]
    equal(choice.finish_reason, "stop", "finish_reason")
    validate(json.loads(choice.message.content or ""), task.CITY_SCHEMA)


@tour.call("schema", "chat.completions.parse with a pydantic model")
def _parse() -> None:
    asked: Any = {**ANSWER, "messages": task.CITY_MESSAGES}
    answer = client.beta.chat.completions.parse(**asked, response_format=City)
    check(isinstance(answer.choices[0].message.parsed, City), "nothing parsed")


@tour.call("schema", "chat.completions.stream with a pydantic model")
def _parse_stream() -> None:
    asked: Any = {**ANSWER, "messages": task.CITY_MESSAGES, "response_format": City}
    with client.chat.completions.stream(**asked) as stream:
        whole = stream.get_final_completion()
    check(isinstance(whole.choices[0].message.parsed, City), "nothing parsed")


@tour.call("schema", "response_format json_object")
def _json_object() -> None:
    asked: Any = {**ANSWER, "messages": task.CITY_MESSAGES}
    choice = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    text = choice.choices[0].message.content or ""
    check(text.startswith("{"), f"no object: {text!r}")


@tour.call("schema", "responses.parse with a pydantic model")
def _parse_response() -> None:
    asked: Any = {"model": tour.model, "input": task.CITY_QUESTION, "temperature": 0}
    answer = client.responses.parse(
        **asked, max_output_tokens=task.ANSWER_TOKENS, store=False, text_format=City
    )
    check(isinstance(answer.output_parsed, City), "nothing parsed")


@tour.call("tool", "tool_choice names a tool, and its result is sent back")
def _named() -> None:
    message = client.chat.completions.create(**WEATHER, tool_choice=task.TOOL_CHOICE)
    calls = message.choices[0].message.tool_calls or []
    equal(len(calls), 1, "tool calls")
    check_tool(calls[0].function.name, calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": calls[0].id, "content": task.TOOL_RESULT}
    told = message.choices[0].message.model_dump(exclude_none=True)
    asked: Any = {**WEATHER, "messages": [*task.TOOL_MESSAGES, told, result]}
    check(client.chat.completions.create(**asked).choices[0].finish_reason, "no answer")


@tour.call("tool", "tool_choice required, streamed")
def _required() -> None:
    # Without the second field so small a model calls until it is cut.
    asked: Any = {**WEATHER, "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked) as stream:
        message = stream.get_final_completion().choices[0].message
    call = (message.tool_calls or [])[0]
    check_tool(call.function.name, call.function.arguments)


@tour.call("tool", "tool_choice auto and none")
def _auto() -> None:
    choice: Any
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**WEATHER, tool_choice=choice).choices[0]
        check(answer.finish_reason in ("stop", "length", "tool_calls"), f"{choice}: no answer")


@tour.call("tool", "responses.create, tool_choice names a tool")
def _respond_tool() -> None:
    tool: Any = {"type": "function", "strict": True, **task.TOOL["function"]}
    answer = client.responses.create(
        model=tour.model,
        input="What is the weather in Paris?",
        tools=[tool],
        tool_choice={"type": "function", "name": task.TOOL_NAME},
        max_output_tokens=task.ANSWER_TOKENS,
        temperature=0,
        store=False,
    )
    call: Any = next(item for item in answer.output if item.type == "function_call")
    equal(call.name, task.TOOL_NAME, "tool")
    validate(json.loads(call.arguments), task.TOOL_SCHEMA)
