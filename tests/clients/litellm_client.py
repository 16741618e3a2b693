"""litellm, which calls any server through one function, with several providers.

`hosted_vllm/…` is its name for servers that speak vLLM's dialect, `openai/…` for OpenAI's,
`text-completion-openai/…` for completions, and `anthropic/…` for the Messages API.
"""

import asyncio
import os
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads prices

import litellm
import pydantic
import pytest
import support as s

completion: Any = litellm.completion
acompletion: Any = litellm.acompletion
HOW: Any = {"api_base": f"{s.URL}/v1", "api_key": s.API_KEY, "num_retries": 0}
GREEDY: Any = {
    **HOW,
    "model": f"hosted_vllm/{s.MODEL}",
    "temperature": 0,
    "max_tokens": s.TOKENS,
}
CHAT: Any = {**GREEDY, "messages": s.MESSAGES}
OPENAI: Any = {**CHAT, "model": f"openai/{s.MODEL}"}
ANTHROPIC: Any = {**CHAT, "model": f"anthropic/{s.MODEL}", "api_base": s.URL}
TEXT: Any = {**GREEDY, "model": f"text-completion-openai/{s.MODEL}", "prompt": s.PROMPT}
LONG: Any = {**CHAT, "max_tokens": s.LONG_TOKENS, "extra_body": {"ignore_eos": True}}
CITY: Any = {**GREEDY, "max_tokens": s.ANSWER_TOKENS, "messages": s.CITY_MESSAGES}
TOOLS: Any = {**CITY, "messages": s.TOOL_MESSAGES, "tools": [s.TOOL]}


class City(pydantic.BaseModel):
    city: Literal["Paris", "London", "Rome"]
    millions: int = pydantic.Field(ge=0, le=99)


def text_of(answer: Any) -> Any:
    return answer.choices[0].message.content


def pieces_of(chunks: Any) -> str:
    return s.joined(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)


@pytest.mark.parametrize("asked", [CHAT, OPENAI, ANTHROPIC], ids=["vllm", "openai", "anthropic"])
def test_completion(asked: Any) -> None:
    answer = completion(**asked)
    assert text_of(answer) == s.chat_text()
    assert answer.usage.prompt_tokens > 0


def test_text_parts_with_cache_control() -> None:
    part = {"type": "text", "text": s.QUESTION, "cache_control": {"type": "ephemeral"}}
    asked = {**CHAT, "messages": [{"role": "user", "content": [part]}]}
    assert text_of(completion(**asked)) == s.chat_text()


def test_fields_of_vllm() -> None:
    sampled: Any = {"temperature": 0.8, "seed": 3, "top_k": 20, "repetition_penalty": 1.1}
    completion(**{**CHAT, **sampled}, min_p=0.05, extra_body={"ignore_eos": True})


def test_sampling_fields() -> None:
    sampled: Any = {**CHAT, "temperature": 0.8, "n": 2, "logprobs": True, "top_logprobs": 2}
    penalties: Any = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"17": -5}}
    answer = completion(**sampled, **penalties, stop=["zzz"])
    assert len(answer.choices) == 2 and answer.choices[0].logprobs


def test_text_completion() -> None:
    answer: Any = litellm.text_completion(**TEXT)
    assert answer.choices[0].text == s.completion_text()
    chunks: Any = litellm.text_completion(**TEXT, stream=True)
    assert s.joined(chunk.choices[0].text for chunk in chunks) == s.completion_text()


async def test_four_at_once() -> None:
    answers = await asyncio.gather(*(acompletion(**CHAT) for _ in range(4)))
    assert all(map(text_of, answers))


def test_response() -> None:
    asked: Any = {**HOW, "model": f"openai/{s.MODEL}", "temperature": 0, "store": False}
    answer: Any = litellm.responses(**asked, input=s.QUESTION, max_output_tokens=s.TOKENS)
    assert answer.output_text == s.chat_text()


def test_stream_with_usage() -> None:
    chunks = list(completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert pieces_of(chunks) == s.chat_text()
    whole: Any = litellm.stream_chunk_builder(chunks)
    assert whole.usage.completion_tokens > 0


async def test_async_stream() -> None:
    stream = await acompletion(**OPENAI, stream=True)
    assert pieces_of([chunk async for chunk in stream]) == s.chat_text()


def test_stream_of_messages() -> None:
    assert pieces_of(completion(**ANTHROPIC, stream=True)) == s.chat_text()


async def test_a_cancelled_stream_is_cancelled() -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _chunk in await acompletion(**LONG, stream=True):
            begun.set()

    with s.given_up():
        call = asyncio.create_task(read())
        await begun.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()


async def test_a_cancelled_task_is_cancelled() -> None:
    await s.cancelled(acompletion(**LONG))


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"model": f"hosted_vllm/{s.UNKNOWN_MODEL}"}, litellm.NotFoundError),
        ({"temperature": 9, "stream": True}, litellm.BadRequestError),
        (
            {"messages": [{"role": "user", "content": s.TOO_LONG}]},
            litellm.ContextWindowExceededError,
        ),
    ],
)
def test_errors(asked: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        list(completion(**{**CHAT, **asked}))


def test_refused_by_decision() -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.embedding(**HOW, model=f"hosted_vllm/{s.MODEL}", input=["tide"])


def test_schema() -> None:
    s.check_city(text_of(completion(**CITY, response_format=s.CITY_FORM)))
    City.model_validate_json(text_of(completion(**CITY, response_format=City)))


def tool_call(message: Any) -> Any:
    (call,) = message.tool_calls
    s.check_tool(call.function.name, call.function.arguments)
    return call


def test_a_named_tool_and_its_result() -> None:
    message = completion(**TOOLS, tool_choice=s.TOOL_CHOICE).choices[0].message
    call = tool_call(message)
    result = {"role": "tool", "tool_call_id": call.id, "content": s.TOOL_RESULT}
    assert completion(**{**TOOLS, "messages": [*s.TOOL_MESSAGES, message.model_dump(), result]})


def test_a_required_tool_streamed() -> None:
    # Without the last field a model this small calls until it is truncated.
    asked: Any = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole: Any = litellm.stream_chunk_builder(list(completion(**asked, stream=True)))
    tool_call(whole.choices[0].message)
