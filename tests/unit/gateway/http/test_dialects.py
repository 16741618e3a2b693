"""Bodies of Responses and Messages: conversion to chats, and random input."""

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.api import messages, responses
from services.gateway.api.chat import BodyFields, ChatRequest, parse_chat
from services.gateway.api.messages import (
    CountTokensRequest,
    MessagesRequest,
    parse_count,
    parse_messages,
)
from services.gateway.api.responses import ResponsesRequest, parse_responses
from services.gateway.http.description import describe_body
from services.gateway.http.messages import MessageBuilder
from services.gateway.http.response_items import Items
from services.gateway.serving.output import OutputPiece, Usage
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.text.token_text import TokenTexts
from services.gateway.vocabulary.delta import Delta, ToolCallDelta
from services.gateway.vocabulary.errors import BadRequest, GatewayError
from tests.support.fuzz import junk, sample

BODIES = 4000


def schema_of(kind: Any, vocabulary: BodyFields) -> dict[str, Any]:
    """The schema of a body in the OpenAPI description."""
    described = describe_body(kind, vocabulary.policy, vocabulary.passed_on)
    schema: dict[str, Any] = described["requestBody"]["content"]["application/json"]["schema"]
    return schema


def turn_of(role: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    """A message of the Messages API."""
    return {"role": role, "content": [*blocks]}


ENDPOINTS: dict[str, tuple[Callable[[Mapping[str, Any]], object], dict[str, Any]]] = {
    "messages": (parse_messages, schema_of(MessagesRequest, messages.FIELDS)),
    "count_tokens": (parse_count, schema_of(CountTokensRequest, messages.FIELDS)),
    "responses": (parse_responses, schema_of(ResponsesRequest, responses.FIELDS)),
}


VOCABULARIES = dict.fromkeys(("messages", "count_tokens"), messages.FIELDS) | {
    "responses": responses.FIELDS
}


def check_names(error: GatewayError, vocabulary: BodyFields) -> None:
    """Assert that an error has no field name of the chat API that this API lacks."""
    if error.code == "unknown_parameter":
        return
    own = set(vocabulary.names.names.values()) | vocabulary.own
    foreign = ({*vocabulary.names.names} | vocabulary.absent | {"function", "role tool"}) - own
    message, param = vocabulary.names.translated(error)
    named = {name.partition(".")[0] for name in re.findall(r"'([a-z_.]+)'", message)}
    # A text of the API may quote {'type': 'function', …}.
    allowed = {"function"} if "'type': 'function'" in message else set()
    assert not named & (foreign - allowed), message
    assert param is None or param.partition(".")[0] not in foreign, param


USE = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
ITEM = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
AT_USE = "messages.0.content.0.tool_use"
SCHEMA: dict[str, Any] = {"type": "json_schema", "schema": 3}
FORMAT = SCHEMA | {"schema": {"$ref": "https://example.org"}}
NAMES: list[tuple[str, dict[str, Any], str]] = [
    *(
        ("messages", fields, name)
        for fields, name in (
            ({"messages": [{"role": "user", "content": [USE]}]}, "tool_use"),
            ({"messages": [turn_of("assistant", USE | {"id": ""})]}, f"{AT_USE}.id"),
            ({"messages": [turn_of("assistant", USE | {"name": ""})]}, f"{AT_USE}.name"),
            ({"messages": [turn_of("assistant", *[USE] * 129)]}, "tool_use"),
            (
                {"messages": [turn_of("user", {"type": "tool_result", "tool_use_id": "stop"})]},
                "tool_use_id",
            ),
            ({"system": "\ud800"}, "system"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"tools": [{"name": "stop", "input_schema": {}}] * 2}, "tools"),
            ({"tools": [{"name": "f", "input_schema": 3}]}, "tools.0.input_schema"),
            ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
            ({"tool_choice": {"type": "tool", "name": "a b"}}, "tool_choice"),
            ({"tool_choice": {"type": "tool", "name": "messages"}}, "tool_choice"),
            ({"output_config": {"effort": "much"}}, "output_config.effort"),
            ({"output_config": {"format": SCHEMA}}, "output_config.format.schema"),
            ({"output_config": {"format": FORMAT}}, "output_config.format"),
            ({"output_config": {"format": FORMAT}, "guided_regex": "a"}, "output_config.format"),
            ({"thinking": {"type": "odd"}}, "thinking.type"),
            ({"service_tier": "odd"}, "service_tier"),
        )
    ),
    *(
        ("responses", fields, name)
        for fields, name in (
            ({"input": [ITEM | {"call_id": ""}]}, "input.0.function_call.call_id"),
            ({"input": [ITEM | {"name": ""}]}, "input.0.function_call.name"),
            ({"input": [ITEM] * 129}, "function_call"),
            (
                {"input": [{"type": "function_call_output", "call_id": "stop", "output": ""}]},
                "call_id",
            ),
            ({"input": "\ud800"}, "input"),
            ({"instructions": "\ud800"}, "instructions"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"max_output_tokens": 3, "min_tokens": 5}, "max_output_tokens"),
            ({"tools": [{"name": "f"}]}, "tools"),
            ({"tools": [{"type": "function", "name": "messages", "strict": 3}]}, "strict"),
            ({"tool_choice": "odd"}, "tool_choice"),
            ({"tool_choice": {"type": "function"}}, "tool_choice"),
            ({"tool_choice": {"type": "function", "name": "messages"}}, "tool_choice"),
            ({"tool_choice": {"type": "allowed_tools", "tools": 3}}, "tool_choice"),
            ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
            ({"text": {"format": {"type": "odd"}}}, "text.format"),
            ({"text": {"format": SCHEMA}}, "text.format.schema"),
            ({"text": {"format": FORMAT}}, "text.format"),
            ({"text": {"format": FORMAT | {"strict": 3}}}, "text.format.strict"),
            ({"text": {"verbosity": "high"}}, "text.verbosity"),
            ({"top_logprobs": 21}, "top_logprobs"),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "fields", "name"), NAMES)
def test_errors_name_the_fields_of_the_dialect(
    endpoint: str, fields: dict[str, Any], name: str
) -> None:
    body: dict[str, Any] = {"model": "m"}
    if endpoint == "messages":
        body |= {
            "max_tokens": 8,
            "messages": [turn_of("user", {"type": "text", "text": "hi"})],
        }
    else:
        body |= {"input": "hi"}
    with pytest.raises(BadRequest) as refused:
        ENDPOINTS[endpoint][0](body | fields)
    vocabulary = VOCABULARIES[endpoint]
    check_names(refused.value, vocabulary)
    assert f"'{name}'" in vocabulary.names.translated(refused.value)[0]


def mutated(rng: random.Random, value: Any, bad: float) -> Any:
    """The value with random junk in some places."""
    if rng.random() < bad:
        return junk(rng)
    if isinstance(value, dict):
        kept = {name: mutated(rng, item, bad) for name, item in value.items()}
        if kept and rng.random() < bad:
            kept.pop(rng.choice(list(kept)))
        return kept
    return [mutated(rng, item, bad) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("endpoint", list(ENDPOINTS))
def test_random_bodies_are_accepted_or_refused(endpoint: str) -> None:
    parse, schema = ENDPOINTS[endpoint]
    taken = 0
    for seed in range(BODIES):
        rng = random.Random(seed)
        names = rng.sample(list(schema["properties"]), rng.choice((0, 1, 2, 4)))
        body: dict[str, Any] = {"model": "m"}
        for name in {*schema["required"], *names} - {"model"}:
            body[name] = sample(rng, schema["properties"][name], {})
        try:
            bad = rng.choice((0.0, 0.03))
            parse({name: mutated(rng, value, bad) for name, value in body.items()})
            taken += 1
        except GatewayError as error:
            assert isinstance(error, BadRequest), (seed, error)
            assert error.message
            check_names(error, VOCABULARIES[endpoint])
    # Both kinds are there in numbers, or little would be shown.
    assert BODIES / 40 < taken < BODIES * 0.95


def chat_of(fields: dict[str, Any]) -> ChatRequest:
    """A chat."""
    return parse_chat({"model": "m", **fields})


def call(call_id: str) -> dict[str, Any]:
    """A call in the form of the chat API."""
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "field", [{"text": {"format": {"type": "text", "x": "\ud800"}}}, {"tool_choice": {"\ud800": 1}}]
)
def test_echoed_fields_are_valid_unicode(field: dict[str, Any]) -> None:
    """Otherwise the error would occur only when the response is written."""
    with pytest.raises(BadRequest) as refused:
        parse_responses({"model": "m", "input": "hi", **field})
    assert refused.value.param is not None


def chat_message(role: str, content: str | None, *calls: str, **fields: Any) -> dict[str, Any]:
    """A chat message with calls of these ids."""
    called = {"tool_calls": [call(entry) for entry in calls]} if calls else {}
    return {"role": role, "content": content} | called | fields


def result(call_id: str, content: str) -> dict[str, Any]:
    return chat_message("tool", content, tool_call_id=call_id)


def test_items_of_a_turn_become_a_single_message() -> None:
    summary = [{"type": "summary_text", "text": "hm"}]
    use = {"type": "function_call", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output"}
    items = [
        chat_message("user", "a"),
        {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        use | {"call_id": "1", "status": "completed"},
        use | {"call_id": "2"},
        output | {"call_id": "1", "output": "x"},
        output | {"call_id": "2", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        use | {"call_id": "3"},
        output | {"call_id": "3", "output": "z"},
        chat_message("assistant", "c"),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
    ]
    chat = [
        chat_message("user", "a"),
        chat_message("assistant", "b", "1", "2", reasoning="hm"),
        *(result("1", "x"), result("2", "y")),
        chat_message("assistant", None, "3", reasoning="so"),
        result("3", "z"),
        *(
            chat_message("assistant", "c"),
            chat_message("assistant", "d"),
            chat_message("user", "e"),
        ),
    ]
    parsed = parse_responses({"model": "m", "input": items}).chat
    assert parsed.messages == chat_of({"messages": chat}).messages


def test_tool_results_are_kept_between_texts() -> None:
    use = {"type": "tool_use", "name": "f", "input": {}}
    text = [{"type": "text", "text": letter} for letter in "xbc"]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": text[:1]},
        text[1],
        {"type": "tool_result", "tool_use_id": "2"},
        text[2],
    ]
    asked = [
        chat_message("user", "a"),
        {"role": "assistant", "content": [use | {"id": "1"}, use | {"id": "2"}]},
        {"role": "user", "content": results},
    ]
    chat = [
        chat_message("user", "a"),
        chat_message("assistant", "", "1", "2"),
        *(result("1", "x"), chat_message("user", "b"), result("2", ""), chat_message("user", "c")),
    ]
    parsed = parse_messages({"model": "m", "max_tokens": 1, "messages": asked})
    assert parsed.messages == chat_of({"messages": chat}).messages


@pytest.mark.parametrize("vocabulary", [messages.FIELDS, responses.FIELDS])
def test_dialect_terms_map_to_chat_terms(vocabulary: BodyFields) -> None:
    chat = ChatRequest.model_fields.keys()
    assert vocabulary.absent <= chat
    # `verbosity` is one that the chat refuses; the others are fields of messages and of formats.
    inner = {"verbosity", "tool_call_id", "tool_calls", "response_format.json_schema"}
    assert vocabulary.names.names.keys() - inner <= chat
    assert not vocabulary.passed_on & (vocabulary.own | vocabulary.absent)


NO_TEXTS = TokenTexts(lambda _: None, b"null", ())
ENDED = Delta(tool_calls=(ToolCallDelta(0, arguments="}", ended=True),))
TEXT = Delta(content="so")
BEGUN = Delta(tool_calls=(ToolCallDelta(0, "call_1", "f", "{"),))
NEXT = Delta(
    tool_calls=(ToolCallDelta(1, "call_2", "f", "{}", ended=True),), finish_reason="tool_calls"
)


def test_the_page_names_the_fields_of_the_chat_that_dialects_take() -> None:
    page = (Path(__file__).parents[4] / "docs" / "api.md").read_text(encoding="utf-8")
    _, _, rest = page.partition("Both take these chat fields")
    both, _, more = rest.partition(". Unknown fields")[0].partition("; Responses takes")
    guided = {name for name in ChatRequest.model_fields if name.startswith("guided_")}
    # Nothing comes of them in Responses.
    asked = responses.FIELDS.passed_on - {"stream_options"}
    shared = set(re.findall(r"`(\w+)`", both)) | guided
    assert shared == messages.FIELDS.passed_on
    assert shared | set(re.findall(r"`(\w+)`", more)) == asked


@pytest.mark.parametrize("parse", [parse_messages, parse_count])
@pytest.mark.parametrize(
    "end",
    [
        "",
        [],
        [{"type": "text", "text": ""}],
        [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": ""}],
    ],
)
def test_a_trailing_empty_assistant_message_is_ignored(
    parse: Callable[[Mapping[str, Any]], ChatRequest], end: Any
) -> None:
    hi = [turn_of("user", {"type": "text", "text": "hi"})]
    body = {"model": "m", "max_tokens": 1}
    empty = {"role": "assistant", "content": end}
    for before in (hi, [*hi, {"role": "assistant", "content": "I"}]):
        assert parse(body | {"messages": [*before, empty]}) == parse(body | {"messages": before})
    # It counts where another message follows.
    assert len(parse(body | {"messages": [*hi, empty, *hi]}).messages) == 3


def test_a_call_at_the_end_is_not_continued() -> None:
    use = turn_of("assistant", {"type": "text", "text": "So"}, USE)
    hi = turn_of("user", {"type": "text", "text": "hi"})
    parsed = parse_messages({"model": "m", "max_tokens": 1, "messages": [hi, use]})
    assert not parsed.continue_final_message and parsed.add_generation_prompt is not False


def test_text_is_kept_between_calls() -> None:
    pieces = [OutputPiece("", delta=delta) for delta in (BEGUN, ENDED, TEXT, NEXT)]
    items = Items(None)
    for piece in pieces:
        items.push(piece)
    items_written = items.written("completed")
    assert [item["type"] for item in items_written] == ["function_call", "message", "function_call"]
    assert [item.get("arguments") for item in items_written] == ["{}", None, "{}"]
    assert {item["status"] for item in items_written} == {"completed"}

    prepared = PreparedRequest("msg_1", 0, "m", (), 1, NO_TEXTS)
    answer = MessageBuilder(prepared)
    for piece in pieces:
        answer.push(piece)
    message = answer.message(Usage(1, 3))
    assert [block["type"] for block in message["content"]] == ["tool_use", "text", "tool_use"]
    assert message["stop_reason"] == "tool_use"


def input_of(arguments: str) -> Any:
    """The input of a call with these arguments, as a client reads it."""
    answer = MessageBuilder(PreparedRequest("msg_1", 0, "m", (), 1, NO_TEXTS))
    answer.push(OutputPiece("", delta=Delta(tool_calls=(ToolCallDelta(0, "1", "f", arguments),))))
    return json.loads(msgspec.json.encode(answer.message(Usage(1, 1))))["content"][0]["input"]


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": "\\ud800"}',
        '{"a": 1e999}',
        '{"a": 123456789012345678901234567890}',
        '{"a": 1.0}',
        "{}",
    ],
)
def test_arguments_are_returned_verbatim(arguments: str) -> None:
    assert input_of(arguments) == json.loads(arguments)


def test_invalid_json_arguments_are_returned_as_text() -> None:
    assert input_of('{"a": "b') == {"INVALID_JSON": '{"a": "b'}
    assert input_of("") == {}
    number = f'{{"a": {"7" * 5_000}}}'
    answer = MessageBuilder(PreparedRequest("msg_1", 0, "m", (), 1, NO_TEXTS))
    answer.push(OutputPiece("", delta=Delta(tool_calls=(ToolCallDelta(0, "1", "f", number),))))
    assert number.encode() in msgspec.json.encode(answer.message(Usage(1, 1)))
