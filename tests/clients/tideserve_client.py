"""tideserve's own client, from the wheels of this tree."""

import asyncio
import threading
import uuid
from typing import Any

import pytest
import support as s

from tideserve.client import (
    AsyncClient,
    Cancelled,
    Client,
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
)

client = Client(s.GRPC, api_key=s.API_KEY)
GREEDY: Any = {"model": s.MODEL, "temperature": 0, "max_tokens": s.TOKENS}
LONG: Any = {**GREEDY, "max_tokens": s.LONG_TOKENS, "ignore_eos": True}
ANSWER: Any = {**GREEDY, "max_tokens": s.ANSWER_TOKENS}
TOOLS: Any = {**ANSWER, "tools": [s.TOOL]}


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.text)


def test_models_and_tokens() -> None:
    assert s.MODEL in [model.id for model in client.models()]
    tokens = client.tokenize(s.PROMPT, model=s.MODEL)
    assert s.PROMPT in client.detokenize(tokens, model=s.MODEL)
    chat = client.tokenize(s.MESSAGES, model=s.MODEL, chat=True)
    assert len(chat) == client.chat(s.MESSAGES, **GREEDY).usage.prompt_tokens


def test_chat() -> None:
    answer = client.chat(s.QUESTION, **GREEDY)
    assert text_of(answer) == s.chat_text()
    assert answer.usage.completion_tokens > 0 and answer.id


def test_system_message_and_parts() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": s.QUESTION}]}
    answer = client.chat([s.BRIEFLY, parts], **GREEDY, seed=3, stop="zzz")
    assert text_of(answer) == s.chat([s.BRIEFLY, *s.MESSAGES])


def test_sampling_fields() -> None:
    sampled: Any = {**GREEDY, "temperature": 0.8, "seed": 1, "min_p": 0.05, "n": 2}
    penalties: Any = {"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}
    asked: Any = {**sampled, **penalties, "logprobs": True, "top_logprobs": 2}
    answer = client.chat(s.QUESTION, **asked, logit_bias={17: -5})
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(len(choice.logprobs) == len(choice.token_ids) for choice in answer.choices)


def test_two_prompts() -> None:
    prompts: Any = [s.PROMPT, client.tokenize(s.PROMPT, model=s.MODEL)]
    answer = client.complete(prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == [s.completion_text()] * 2


async def test_four_at_once() -> None:
    async with AsyncClient(s.GRPC, api_key=s.API_KEY) as opened:
        answers = await asyncio.gather(*(opened.chat(s.QUESTION, **GREEDY) for _ in range(4)))
    assert all(map(text_of, answers))


def test_stream() -> None:
    with client.stream_chat(s.QUESTION, **GREEDY) as stream:
        pieces = list(stream)
    assert s.joined(piece.text for piece in pieces) == s.chat_text()
    assert pieces[-1].usage.completion_tokens > 0


def test_stream_of_a_completion() -> None:
    with client.stream_complete(s.PROMPT, **GREEDY) as stream:
        assert s.joined(piece.text for piece in stream) == s.completion_text()


async def test_async_stream() -> None:
    async with (
        AsyncClient(s.GRPC, api_key=s.API_KEY) as opened,
        opened.stream_chat(s.QUESTION, **GREEDY) as stream,
    ):
        texts = [piece.text async for piece in stream]
    assert s.joined(texts) == s.chat_text()


def test_an_abandoned_stream_is_cancelled() -> None:
    with s.given_up(), client.stream_chat(s.QUESTION, **LONG) as stream:
        for _, _piece in zip(range(4), stream, strict=False):
            pass


def test_cancel_by_the_id_of_the_response() -> None:
    with s.given_up(), client.stream_chat(s.QUESTION, **LONG) as stream:
        next(stream)
        client.cancel(stream.id)
        with pytest.raises(Cancelled):
            list(stream)
        client.cancel(stream.id)  # a repeated cancel is no error


def test_cancel_by_a_chosen_id() -> None:
    ended: list[BaseException] = []
    chosen = f"chosen-{uuid.uuid4()}"

    def ask() -> None:
        try:
            client.chat(s.QUESTION, **LONG, request_id=chosen)
        except Cancelled as error:
            ended.append(error)

    with s.given_up() as before:
        asking = threading.Thread(target=ask)
        asking.start()
        s.wait_for_token(before)
        client.cancel(chosen)
        asking.join()
    assert len(ended) == 1


async def test_a_cancelled_task_is_cancelled() -> None:
    async with AsyncClient(s.GRPC, api_key=s.API_KEY) as opened:
        await s.cancelled(opened.chat(s.QUESTION, **LONG))


def test_errors() -> None:
    with pytest.raises(ModelNotFound) as unknown:
        client.chat(s.QUESTION, **{**GREEDY, "model": s.UNKNOWN_MODEL})
    assert unknown.value.request_id
    with pytest.raises(InvalidRequest) as invalid:
        list(client.stream_chat(s.QUESTION, **{**GREEDY, "temperature": 9}))
    assert invalid.value.field == "temperature"
    with pytest.raises(ContextLengthExceeded):
        client.complete(s.TOO_LONG, **GREEDY)


def test_schema() -> None:
    answer = client.chat(s.CITY_QUESTION, **ANSWER, json_schema=s.CITY_SCHEMA)
    s.check_city(text_of(answer))


def test_regex_and_choices() -> None:
    with client.stream_complete(s.PROMPT, **ANSWER, regex=r" [A-Z][a-z]{2,8}\.") as stream:
        text = s.joined(piece.text for piece in stream)
    assert text.startswith(" ") and text.endswith(".")
    answer = client.complete("The capital is", **ANSWER, choices=[" Paris", " London"])
    assert answer.choices[0].text in (" Paris", " London")


def test_a_named_tool_and_its_result() -> None:
    message = client.chat(s.TOOL_MESSAGES, **TOOLS, tool_choice=s.TOOL_CHOICE).choices[0].message
    (call,) = message.tool_calls
    s.check_tool(call.name, call.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": s.TOOL_RESULT}
    again = client.chat([*s.TOOL_MESSAGES, message, result], **TOOLS)
    assert again.choices[0].finish_reason


def test_a_required_tool_streamed() -> None:
    # Without the last field a model this small calls until it is truncated.
    asked: Any = {**TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    with client.stream_chat(s.TOOL_MESSAGES, **asked) as stream:
        deltas = [delta for piece in stream for delta in piece.tool_calls]
    assert {delta.index for delta in deltas} == {0}
    arguments = s.joined(delta.arguments for delta in deltas)
    s.check_tool(s.joined(delta.name for delta in deltas), arguments)
