"""litellm, which speaks to any server through one function; here as its providers do it.

`hosted_vllm/…` is its name for servers that speak vLLM's dialect, `openai/…` for OpenAI's,
`text-completion-openai/…` for completions, and `anthropic/…` for the Messages API.
"""

import asyncio
import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it fetches prices otherwise

import litellm

from tours import task
from tours.city import City
from tours.tour import Tour, check, check_tool, equal, joined, refused, validate

tour = Tour()
VLLM = f"hosted_vllm/{tour.model}"
HOW: Any = {"api_base": f"{tour.url}/v1", "api_key": tour.api_key, "num_retries": 0}
GREEDY: Any = {**HOW, "model": VLLM, "temperature": 0, "max_tokens": task.TOKENS}
CHAT: Any = {**GREEDY, "messages": task.MESSAGES}
LONG: Any = {**CHAT, "max_tokens": task.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
TEXT: Any = {**GREEDY, "model": f"text-completion-openai/{tour.model}", "prompt": task.PROMPT}
MESSAGES: Any = {**CHAT, "model": f"anthropic/{tour.model}", "api_base": tour.url}
CITY: Any = {**GREEDY, "max_tokens": task.ANSWER_TOKENS, "messages": task.CITY_MESSAGES}
WEATHER: Any = {
    **GREEDY,
    "max_tokens": task.ANSWER_TOKENS,
    "messages": task.TOOL_MESSAGES,
    "tools": [task.TOOL],
}


def _text(answer: Any) -> Any:
    return answer.choices[0].message.content


def _pieces(chunks: Any) -> str:
    return joined([chunk.choices[0].delta.content for chunk in chunks if chunk.choices])


@tour.call("unary", "completion, hosted_vllm")
def _chat() -> None:
    answer: Any = litellm.completion(**CHAT)
    equal(_text(answer), tour.plain.chat_text)
    check(answer.usage.prompt_tokens > 0, "no usage")


@tour.call("unary", "completion, openai")
def _openai() -> None:
    equal(
        _text(litellm.completion(**{**CHAT, "model": f"openai/{tour.model}"})), tour.plain.chat_text
    )


@tour.call("unary", "completion: text parts with cache_control")
def _parts() -> None:
    part = {"type": "text", "text": task.QUESTION, "cache_control": {"type": "ephemeral"}}
    asked = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
    equal(_text(litellm.completion(**asked)), tour.plain.chat_text)


@tour.call("unary", "completion: vLLM's fields")
def _fields() -> None:
    sampled: Any = {"temperature": 0.8, "seed": 3, "top_k": 20, "repetition_penalty": 1.1}
    litellm.completion(**{**CHAT, **sampled}, min_p=0.05, extra_body={"ignore_eos": True})


@tour.call("unary", "completion: n, logprobs, penalties, logit_bias, stop")
def _more_fields() -> None:
    asked: Any = {**CHAT, "temperature": 0.8, "n": 2, "logprobs": True, "top_logprobs": 2}
    answer: Any = litellm.completion(
        **asked, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={"17": -5}, stop=["zzz"]
    )
    equal(len(answer.choices), 2, "choices")
    check(answer.choices[0].logprobs, "no logprobs")


@tour.call("unary", "text_completion")
def _complete() -> None:
    answer: Any = litellm.text_completion(**TEXT)
    equal(answer.choices[0].text, tour.plain.completion_text)


@tour.call("unary", "acompletion, four at once")
async def _at_once() -> None:
    answers = await asyncio.gather(*(litellm.acompletion(**CHAT) for _ in range(4)))
    for answer in answers:
        check(_text(answer), "an empty answer")


@tour.call("unary", "completion, anthropic")
def _messages() -> None:
    equal(_text(litellm.completion(**MESSAGES)), tour.plain.chat_text)


@tour.call("unary", "responses")
def _respond() -> None:
    answer: Any = litellm.responses(
        **{**HOW, "model": f"openai/{tour.model}"},
        input=task.QUESTION,
        max_output_tokens=task.TOKENS,
        temperature=0,
        store=False,
    )
    equal(answer.output_text, tour.plain.chat_text)


@tour.call("stream", "completion, hosted_vllm, include_usage")
def _stream() -> None:
    chunks: Any = list(
        litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True})
    )
    equal(_pieces(chunks), tour.plain.chat_text)
    whole: Any = litellm.stream_chunk_builder(chunks)
    check(whole.usage.completion_tokens > 0, "no usage")


@tour.call("stream", "acompletion, openai")
async def _stream_async() -> None:
    asked: Any = {**CHAT, "model": f"openai/{tour.model}", "stream": True}
    stream: Any = await litellm.acompletion(**asked)
    equal(_pieces([chunk async for chunk in stream]), tour.plain.chat_text)


@tour.call("stream", "text_completion")
def _stream_text() -> None:
    chunks: Any = litellm.text_completion(**TEXT, stream=True)
    equal(joined([chunk.choices[0].text for chunk in chunks]), tour.plain.completion_text)


@tour.call("stream", "completion, anthropic")
def _stream_messages() -> None:
    equal(_pieces(litellm.completion(**MESSAGES, stream=True)), tour.plain.chat_text)


@tour.call("cancel", "a stream whose task is cancelled")
async def _close() -> None:
    async def read() -> None:
        stream: Any = await litellm.acompletion(**LONG, stream=True)
        async for _chunk in stream:
            begun.set()

    with tour.given_up():
        begun = asyncio.Event()
        call = asyncio.create_task(read())
        await begun.wait()
        call.cancel()
        await asyncio.wait([call])
        check(call.cancelled(), "it was over")


@tour.call("cancel", "a unary call whose task is cancelled")
async def _cancel() -> None:
    await tour.cancelled(litellm.acompletion(**LONG))


@tour.call("error", "unknown model")
def _unknown_model() -> None:
    asked = {**CHAT, "model": f"hosted_vllm/{task.UNKNOWN_MODEL}"}
    refused(lambda: litellm.completion(**asked), litellm.NotFoundError)


@tour.call("error", "temperature out of range, streamed")
def _bad_value() -> None:
    asked = {**CHAT, "temperature": 9, "stream": True}
    refused(lambda: list(litellm.completion(**asked)), litellm.BadRequestError)


@tour.call("error", "prompt beyond the context")
def _too_long() -> None:
    asked: Any = {**CHAT, "messages": [{"role": "user", "content": "word " * 20_000}]}
    refused(lambda: litellm.completion(**asked), litellm.ContextWindowExceededError)


@tour.limit("embedding", "api.md#embeddings")
def _embed() -> None:
    asked: Any = {**HOW, "model": VLLM, "input": ["tide"]}
    refused(lambda: litellm.embedding(**asked), litellm.BadRequestError)


@tour.call("schema", "response_format json_schema")
def _schema() -> None:
    validate(
        json.loads(_text(litellm.completion(**CITY, response_format=task.CITY_FORM))),
        task.CITY_SCHEMA,
    )


@tour.call("schema", "response_format of a pydantic model")
def _model() -> None:
    City.model_validate_json(_text(litellm.completion(**CITY, response_format=City)))


def _check_call(message: Any) -> Any:
    (call,) = message.tool_calls
    check_tool(call.function.name, call.function.arguments)
    return call


@tour.call("tool", "tool_choice names a tool, and its result is sent back")
def _named() -> None:
    answer: Any = litellm.completion(**WEATHER, tool_choice=task.TOOL_CHOICE)
    message = answer.choices[0].message
    call = _check_call(message)
    result = {"role": "tool", "tool_call_id": call.id, "content": task.TOOL_RESULT}
    asked = {**WEATHER, "messages": [*task.TOOL_MESSAGES, message.model_dump(), result]}
    check(litellm.completion(**asked), "no answer")


@tour.call("tool", "tool_choice required, streamed")
def _required() -> None:
    # Without the second field so small a model calls until it is cut.
    asked: Any = {**WEATHER, "tool_choice": "required", "parallel_tool_calls": False}
    chunks: Any = list(litellm.completion(**asked, stream=True))
    whole: Any = litellm.stream_chunk_builder(chunks)
    _check_call(whole.choices[0].message)
