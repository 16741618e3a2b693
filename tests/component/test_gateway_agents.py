"""Tools, reasoning and output formats, as seen by clients and by the worker."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from services.common.clock import monotonic_s
from services.common.etcd import Store
from tests.support.bad_inputs import SLOW
from tests.support.gateway import Case, gateway_case, text_ids
from tests.support.waiting import eventually

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


pytestmark = pytest.mark.gateway(max_model_len=4096)


def last_prompt(case: Case) -> str:
    """The text of the worker's newest prompt."""
    start = case.cluster.workers[0].starts[-1]
    letters = {ids[0]: chr(code) for code in range(128) if len(ids := text_ids(chr(code))) == 1}
    return "".join(letters.get(token_id, "?") for token_id in start.prompt_ids)


async def test_a_tool_call_and_its_result(case: Case) -> None:
    case.answer_with(f"Let me see.\n{CALL}")
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    first = await case.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore[list-item]
    message = first.choices[0].message

    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function" and call.id.startswith("call_")
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert '"name": "get_weather"' in last_prompt(case)

    case.answer_with("It rains.")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    second = await case.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])  # type: ignore[list-item]

    assert second.choices[0].message.content == "It rains."
    assert second.choices[0].finish_reason == "stop"
    assert "<tool_response>\nrain\n</tool_response>" in last_prompt(case)


async def test_a_streamed_call_equals_the_whole_call(case: Case) -> None:
    case.answer_with(f"Well.\n{CALL}\n{CALL}")
    chunks = await case.openai.chat.completions.create(
        model="m",
        messages=[{"role": "user", "content": "hi"}],
        tools=[TOOL],  # type: ignore[list-item]
        stream=True,
    )
    content, calls, reasons = "", {}, []
    async for chunk in chunks:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            assert call.function is not None
            if call.id is not None:
                assert call.type == "function" and call.index == len(calls)
                calls[call.index] = [call.id, call.function.name, ""]
            calls[call.index][2] += call.function.arguments or ""

    assert content == "Well."
    assert [call[1:] for call in calls.values()] == [["get_weather", ARGUMENTS]] * 2
    assert len({call[0] for call in calls.values()}) == 2
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}


async def chunks_of(case: Case, **fields: Any) -> list[dict[str, Any]]:
    """The chunks of a stream with tools."""
    answer = await case.chat(tools=[TOOL], stream=True, **fields)
    lines = [line for line in answer.text.splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_tokens_around_a_call_cause_no_events(case: Case) -> None:
    case.answer_with(CALL)
    first, *chunks, last = [chunk["choices"][0] for chunk in await chunks_of(case)]
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert chunks and all(chunk["delta"].keys() == {"tool_calls"} for chunk in chunks)
    assert last["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
async def test_each_token_has_an_event_if_requested(case: Case, fields: dict[str, Any]) -> None:
    case.answer_with(CALL)
    chunks = [chunk for chunk in await chunks_of(case, **fields) if chunk["choices"]]
    # The first event opens the response; the last token ends it.
    assert len(chunks) == 1 + len(text_ids(CALL)) + 1


async def test_text_after_a_call_in_the_same_token_is_sent(case: Case) -> None:
    case.answer_with(f"{CALL}and on it goes")
    case.cluster.workers[0].tokens_per_event = len(text_ids(f"{CALL}and"))
    whole = (await case.chat(tools=[TOOL])).json()["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in await chunks_of(case)]
    assert whole["content"].endswith("and on it goes")
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["content"]


async def test_a_message_with_calls_only_has_no_content(case: Case) -> None:
    case.answer_with(CALL)
    choice = (await case.chat(tools=[TOOL])).json()["choices"][0]

    assert choice["message"]["content"] is None
    assert len(choice["message"]["tool_calls"]) == 1


async def test_without_tools_calls_are_text(case: Case) -> None:
    case.answer_with(CALL)
    for fields in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = (await case.chat(**fields)).json()["choices"][0]

        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_reasoning_is_separate(store: Store, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"reasoning_format": "qwen3"}
    async with gateway_case(store, tmp_path / "model", **fields) as case:
        case.answer_with("<think>\nhm\n</think>\n\nYes.")
        message = (await case.chat()).json()["choices"][0]["message"]
        assert message["content"] == "Yes."
        assert message["reasoning"] == message["reasoning_content"] == "hm"

        hidden = (await case.chat(include_reasoning=False)).json()["choices"][0]["message"]
        assert hidden["content"] == "Yes." and "reasoning" not in hidden

        stream = await case.openai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        deltas = [chunk.choices[0].delta.to_dict() async for chunk in stream]
        assert "".join(str(delta.get("reasoning", "")) for delta in deltas) == "hm"
        assert "".join(str(delta.get("content") or "") for delta in deltas) == "Yes."


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"guided_regex": "[0-9]+"}, "[0-9]+"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, '"yes" | "no"'),
        ({"response_format": {"type": "json_object"}}, '"type":"object"'),
        (
            {"response_format": FORM},
            '"properties":{"a":{"type":"integer"}}',
        ),
        ({"tools": [TOOL], "tool_choice": "required"}, 'marked: "<tool_call>"'),
        (
            {"tools": [TOOL], "tool_choice": NAMED},
            '\\"name\\": \\"get_weather\\"',
        ),
    ],
)  # fmt: skip
async def test_constraints_reach_the_worker(case: Case, fields: dict[str, Any], part: str) -> None:
    answer = await case.chat(max_tokens=2, **fields)
    assert answer.status_code == 200, answer.text

    grammar = case.cluster.workers[0].starts[-1].sampling.grammar
    assert part in grammar.json_schema + grammar.regex + grammar.lark


LOOSE = {
    "type": "object",
    "properties": {
        "mail": {"type": "string", "format": "email", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"},
        "tags": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    },
    "required": ["mail"],
}
PATTERN = "$.properties.mail.pattern (look-around, including look-ahead and look-behind, is not"
UNIQUE = "$.properties.tags.uniqueItems"


def requests_with(schema: dict[str, Any], strict: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Requests of each HTTP API whose output, or forced call, must match the schema."""
    chat, responses, messages = "/v1/chat/completions", "/v1/responses", "/v1/messages"
    named = {"name": "f", "strict": strict}
    form = {"type": "json_schema", "json_schema": named | {"schema": schema}}
    nested = {"type": "function", "function": named | {"parameters": schema}}
    flat = {"type": "function", "parameters": schema, **named}
    tool = {"input_schema": schema, **named}
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    config = {"format": {"type": "json_schema", "schema": schema}}
    requests = {
        "completions": ("/v1/completions", {"prompt": "hi", "response_format": form}),
        "chat": (chat, hi | {"response_format": form}),
        "chat tool": (chat, hi | {"tools": [nested], "tool_choice": "required"}),
        "chat format or tool": (chat, hi | {"tools": [nested], "response_format": FORM}),
        "responses": (
            responses,
            {"input": "hi", "text": {"format": named | {"type": "json_schema", "schema": schema}}},
        ),
        "responses tool": (
            responses,
            {"input": "hi", "tools": [flat], "tool_choice": {"type": "function", "name": "f"}},
        ),
        "messages tool": (messages, hi | {"tools": [tool], "tool_choice": {"type": "any"}}),
    }
    # This format has no flag: it is always strict.
    return requests | ({"messages": (messages, hi | {"output_config": config})} if strict else {})


@pytest.mark.parametrize("api", requests_with(LOOSE, strict=True))
async def test_a_part_that_is_not_enforced_is_in_a_warning_or_an_error(
    case: Case, api: str
) -> None:
    subject = "tool f, " if "tool" in api else ""
    for strict in (False, True):
        requests = requests_with(LOOSE, strict)
        if api not in requests:
            continue
        path, fields = requests[api]
        for stream in (False, True):
            limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
            body = fields | {"model": "m", limit: 20, "stream": stream}
            answer = await case.http.post(path, json=body)
            if strict:
                assert answer.status_code == 400
                assert f"{subject}{PATTERN}" in answer.json()["error"]["message"]
                continue
            assert answer.status_code == 200, answer.text
            assert f"not enforced: {subject}{PATTERN}" in answer.headers["warning"]
            assert f"not enforced: {subject}{UNIQUE}" in answer.headers["warning"]
            grammar = case.cluster.workers[0].starts[-1].sampling.grammar
            text = grammar.json_schema + grammar.lark
            assert '"format":"email"' in text and '"pattern"' not in text


@pytest.mark.parametrize("api", requests_with(LOOSE, strict=True))
async def test_a_schema_that_no_text_matches_is_refused(case: Case, api: str) -> None:
    loop = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}
    schema = loop | {"$defs": {"x": {"$ref": "#/$defs/x"}}}
    path, fields = requests_with(schema, strict=True)[api]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = await case.http.post(path, json=fields | {"model": "m", limit: 20})
    assert answer.status_code == 400
    assert "$.properties.a.$ref refers to itself" in answer.json()["error"]["message"]


async def test_an_exploding_schema_is_refused_without_delaying_streams(case: Case) -> None:
    worker = case.cluster.workers[0]
    times: list[float] = []

    async def read() -> None:
        async with case.stream(max_tokens=400) as answer:
            async for line in answer.aiter_lines():
                if line:
                    times.append(monotonic_s())

    reading = asyncio.create_task(read())
    await eventually(lambda: bool(times))
    before = len(times)
    with pytest.raises(BadRequestError) as caught:
        await case.openai.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "hi"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": dict(SLOW)},
            },
        )
    during = len(times) - before
    await reading

    assert "takes too long to compile" in caught.value.message
    assert during > 0
    assert len(worker.starts) == 1


async def test_tool_results_without_a_call_are_refused(case: Case) -> None:
    messages = [{"role": "tool", "tool_call_id": "1", "content": "x"}]
    answer = await case.chat(messages=messages)

    assert answer.status_code == 400
    assert json.loads(answer.text)["error"]["param"] == "messages"
