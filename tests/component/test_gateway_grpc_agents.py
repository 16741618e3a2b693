"""Tools, reasoning and output formats over gRPC, equal to those over HTTP."""

import asyncio
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.support.byte_tokenizer import EOS_ID
from tests.support.gateway import Case, text_ids
from tideserve import client as tide
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
HI = "hi"
PAGE = Path(__file__).parents[2] / "docs" / "grpc.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


pytestmark = pytest.mark.gateway(max_model_len=4096, reasoning_format="qwen3")


async def streamed(case: Case, **fields: Any) -> tuple[pb.Message, int]:
    """The accumulated message of a stream, and its finish reason."""
    whole = pb.Message(role=pb.ROLE_ASSISTANT)
    text, reason = "", 0
    async with case.grpc.stream_chat(HI, model="m", **fields) as stream:
        async for piece in stream:
            text += piece.text
            whole.reasoning += piece.reasoning
            for call in piece.tool_calls:
                if call.index == len(whole.tool_calls):
                    whole.tool_calls.add(id=call.id, name=call.name)
                whole.tool_calls[call.index].arguments += call.arguments
            reason = piece.finish_reason
    if text or not whole.tool_calls:
        whole.text = text
    return whole, reason


@pytest.mark.parametrize("tokens_per_event", [1, 7, 500])
async def test_calls_reasoning_and_text(case: Case, tokens_per_event: int) -> None:
    case.cluster.workers[0].tokens_per_event = tokens_per_event
    case.answer_with(f"<think>\nhm\n</think>\n\nLet me see.\n{CALL}\n{CALL}")
    answer = await case.grpc.chat(HI, model="m", tools=[TOOL])
    message = answer.choices[0].message
    assert (message.text, message.reasoning) == ("Let me see.", "hm")
    assert [(call.name, call.arguments) for call in message.tool_calls] == [
        ("get_weather", ARGUMENTS)
    ] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    assert answer.choices[0].finish_reason == pb.FINISH_REASON_TOOL_CALLS
    again, reason = await streamed(case, tools=[TOOL])
    assert reason == pb.FINISH_REASON_TOOL_CALLS
    for received in (message, again):
        for call in received.tool_calls:
            call.id = ""
    assert again == message


async def test_a_response_can_be_sent_back(case: Case) -> None:
    case.answer_with(CALL)
    first = (await case.grpc.chat(HI, model="m", tools=[TOOL])).choices[0].message
    assert first.WhichOneof("content") is None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    case.answer_with("It rains.")
    messages: list[Any] = [{"role": "user", "content": HI}, first, result]
    second = await case.grpc.chat(messages, model="m", tools=[TOOL])
    assert second.choices[0].message.text == "It rains."
    prompt = list(case.cluster.workers[0].starts[-1].prompt_ids)
    call = {"name": "get_weather", "arguments": ARGUMENTS}
    body = [
        messages[0],
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": first.tool_calls[0].id, "type": "function", "function": call}],
        },
        result,
    ]
    assert (await case.chat(messages=body, tools=[TOOL])).status_code == 200
    assert list(case.cluster.workers[0].starts[-1].prompt_ids) == prompt


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        (
            {"json_schema": SCHEMA},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA},
                }
            },
        ),
        ({"regex": "[0-9]+"}, {"structured_outputs": {"regex": "[0-9]+"}}),
        ({"lark": 'start: "a"'}, {"structured_outputs": {"grammar": 'start: "a"'}}),
        ({"choices": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}),
        (
            {"tools": [TOOL], "tool_choice": "required"},
            {"tools": [TOOL], "tool_choice": "required"},
        ),
        ({"tools": [TOOL], "tool_choice": NAMED}, {"tools": [TOOL], "tool_choice": NAMED}),
        (
            {"tools": [TOOL], "parallel_tool_calls": False},
            {"tools": [TOOL], "parallel_tool_calls": False},
        ),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": True}},
        ),
    ],
)
async def test_workers_get_the_same_as_over_http(case: Case, fields: Any, body: Any) -> None:
    answer = await case.chat(max_tokens=2, seed=1, **body)
    if answer.status_code != 200:
        with pytest.raises(tide.TideserveError) as caught:
            await case.grpc.chat(HI, model="m", max_tokens=2, seed=1, **fields)
        error = answer.json()["error"]
        assert (caught.value.message, caught.value.field) == (error["message"], error["param"])
        return
    await case.grpc.chat(HI, model="m", max_tokens=2, seed=1, **fields)
    http, grpc = case.cluster.workers[0].starts[-2:]
    assert grpc.sampling == http.sampling
    assert grpc.prompt_ids == http.prompt_ids


async def test_the_order_of_schema_properties_is_kept(case: Case) -> None:
    """Models see properties in the order in which they were written."""
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in "zay"}}
    await case.grpc.chat(HI, model="m", max_tokens=2, json_schema=json.dumps(schema))
    grammar = case.cluster.workers[0].starts[-1].sampling.grammar
    text = grammar.json_schema or grammar.lark
    assert text.index('"z"') < text.index('"a"') < text.index('"y"')


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"json_schema": "{"}, "structure.json_schema"),
        ({"json_schema": "[]"}, "structure.json_schema"),
        ({"json_schema": {"type": "str"}}, "structure.json_schema"),
        ({"regex": "("}, "structure.regex"),
        ({"choices": []}, "structure.choices"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [{"function": {"name": "f", "parameters": "{"}}]}, "tools"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
)
async def test_errors_name_fields_of_the_contract(case: Case, fields: Any, field: str) -> None:
    with pytest.raises(tide.InvalidRequest) as caught:
        await case.grpc.chat(HI, model="m", **fields)
    assert caught.value.field == field


def run(example: str, target: str) -> str:
    """The output of an example of the page that calls the gateway at `target`."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        exec(example.replace("localhost:50051", target), {})
    return written.getvalue()


async def test_examples_of_the_page(case: Case) -> None:
    first, tools, form, cancelled = EXAMPLES
    worker = case.cluster.workers[0]
    case.answer_with("Paris")
    written = await asyncio.to_thread(run, first, case.target)
    assert written.startswith("Paris 6\nParisMODEL_NOT_FOUND model ")
    answers = [CALL, "It rains."]
    worker.script = lambda _: [*text_ids(answers.pop(0)), EOS_ID]
    assert await asyncio.to_thread(run, tools, case.target) == "get_weather Köln\nIt rains.\n"
    assert worker.starts[-2].sampling.HasField("grammar") and not answers
    case.answer_with('{"capital": "Paris"}')
    assert await asyncio.to_thread(run, form, case.target) == "Paris\n"
    assert worker.starts[-1].sampling.HasField("grammar")
    # It writes no more than this until it is cancelled, as it never ends.
    case.answer_with("sea " * 10)
    worker.pause_at = 30
    written = await asyncio.to_thread(run, cancelled, case.target)
    assert written.startswith("sea sea ") and written.endswith("ended\n")


LOOSE = {
    "type": "object",
    "properties": {
        "mail": {"type": "string", "pattern": "^(?!a)b"},
        "tags": {"type": "array", "uniqueItems": True},
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tool", [False, True])
async def test_a_part_that_is_not_enforced_is_in_a_warning(
    case: Case, stream: bool, tool: bool
) -> None:
    chat = pb.ChatRequest(model="m", sampling=pb.Sampling(max_tokens=4))
    chat.messages.add(role=pb.ROLE_USER, text="hi")
    if tool:
        chat.tools.add(name="f", parameters=json.dumps(LOOSE))
        chat.tool_choice.name = "f"
    else:
        chat.structure.json_schema = json.dumps(LOOSE)
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.StreamChat(pb.StreamChatRequest(chat=chat)) if stream else stub.Chat(chat)
        warnings = [text for name, text in await call.initial_metadata() if name == "warning"]
    subject = "tool f, " if tool else ""
    assert len(warnings) == 2
    assert f"not enforced: {subject}$.properties.mail.pattern (look-around" in warnings[0]
    assert f"not enforced: {subject}$.properties.tags.uniqueItems" in warnings[1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_system_message_that_is_moved_is_in_a_warning(case: Case, stream: bool) -> None:
    chat = pb.ChatRequest(model="m", sampling=pb.Sampling(max_tokens=4))
    chat.messages.add(role=pb.ROLE_USER, text="hi")
    chat.messages.add(role=pb.ROLE_SYSTEM, text="late")
    async with grpc.aio.insecure_channel(case.target) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.StreamChat(pb.StreamChatRequest(chat=chat)) if stream else stub.Chat(chat)
        warnings = [text for name, text in await call.initial_metadata() if name == "warning"]
    assert len(warnings) == 1 and "later ones were moved" in warnings[0]
