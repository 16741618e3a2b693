"""Requests of the client match their arguments."""

import json
from typing import Any

import pytest

from tideserve.client import request as build
from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2 as pb

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}


def test_a_string_is_a_user_message() -> None:
    request = build.chat_request("hi", "m", {})
    assert request == pb.ChatRequest(model="m", messages=[pb.Message(role=pb.ROLE_USER, text="hi")])


def test_openai_messages_are_accepted() -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        pb.Message(role=pb.ROLE_ASSISTANT, text="as it came", reasoning="why"),
    ]
    made = build.chat_request(messages, "m", {}).messages
    assert [message.role for message in made] == [
        pb.ROLE_SYSTEM,
        pb.ROLE_USER,
        pb.ROLE_ASSISTANT,
        pb.ROLE_TOOL,
        pb.ROLE_ASSISTANT,
    ]
    assert [part.text for part in made[1].parts.parts] == ["a", "b"]
    assert made[2].WhichOneof("content") is None
    assert made[2].tool_calls[0] == pb.ToolCall(id="c1", name="f", arguments="{}")
    assert (made[3].tool_call_id, made[3].text) == ("c1", "3")
    assert made[4] == messages[4]


def test_zero_values_are_sent() -> None:
    sampling = build.chat_request("hi", "m", {"temperature": 0.0, "seed": 0, "n": 0}).sampling
    assert sampling.HasField("temperature") and sampling.HasField("seed") and sampling.HasField("n")
    assert not sampling.HasField("top_p")


def test_all_fields_are_set() -> None:
    request = build.chat_request(
        "hi",
        "m",
        {
            "stop": "end",
            "logit_bias": {5: -1.5},
            "bad_words": ["x"],
            "json_schema": SCHEMA,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
            "enable_thinking": False,
            "reasoning_effort": "low",
            "chat_template_kwargs": {"x": 1},
            "request_id": "mine",
            "service_class": "batch",
            "priority": 0,
            "ttft_ms": 10.0,
        },
    )
    assert list(request.sampling.stop) == ["end"]
    assert dict(request.sampling.logit_bias) == {5: -1.5}
    # In the order in which the schema was written, which models see.
    assert request.structure.json_schema == json.dumps(SCHEMA)
    assert request.tools[0].parameters == json.dumps(SCHEMA)
    assert request.tool_choice.name == "f"
    assert request.HasField("parallel_tool_calls") and not request.parallel_tool_calls
    assert request.reasoning == pb.Reasoning(
        enable_thinking=False, effort="low", chat_template_kwargs='{"x": 1}'
    )
    assert request.options == pb.Options(
        request_id="mine",
        service_class=service_pb2.SERVICE_CLASS_BATCH,
        priority=0,
        service_level=pb.ServiceLevel(ttft_ms=10.0),
    )
    for choice, mode in [("auto", pb.TOOL_MODE_AUTO), ("required", pb.TOOL_MODE_REQUIRED)]:
        assert build.chat_request("hi", "m", {"tool_choice": choice}).tool_choice.mode == mode


@pytest.mark.parametrize(
    ("given", "texts"),
    [("a", ["a"]), ([1, 2], [[1, 2]]), (["a", "b"], ["a", "b"]), ([[1], "b"], [[1], "b"])],
)
def test_prompt_forms_are_accepted(given: Any, texts: list[Any]) -> None:
    request = build.completion_request(given, "m", {"echo": True})
    forms = [prompt.text or list(prompt.token_ids.ids) for prompt in request.prompts]
    assert forms == texts
    assert request.echo


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temprature": 1}, "unknown fields temprature"),
        ({"json_schema": {}, "regex": "a"}, "json_schema and regex are mutually exclusive"),
        ({"tool_choice": "sometimes"}, "one of auto, none, required"),
        ({"service_class": "gold"}, "one of interactive, standard, batch"),
    ],
)
def test_invalid_requests_are_refused_by_the_client(fields: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        build.chat_request("hi", "m", fields)


@pytest.mark.parametrize(
    "name", ["bad_words", "choices", "allowed_token_ids", "stop_token_ids", "tools"]
)
@pytest.mark.parametrize("value", ["ab", b"ab", {"ab": 1}])
def test_a_non_list_is_not_iterated(name: str, value: Any) -> None:
    fields: Any = {name: value}
    with pytest.raises(TypeError, match=f"{name} is a .*; pass a list of"):
        build.chat_request("hi", "m", fields)


def test_a_stop_is_a_string_or_a_list() -> None:
    assert build.chat_request("hi", "m", {"stop": "ab"}).sampling.stop == ["ab"]
    with pytest.raises(TypeError, match="stop is a bytes"):
        build.chat_request("hi", "m", {"stop": b"ab"})  # type: ignore[typeddict-item]


@pytest.mark.parametrize("given", [b"ab", [b"ab"], {"a": 1}, [{"a": 1}]])
def test_prompts_are_texts_or_token_ids(given: Any) -> None:
    with pytest.raises(TypeError, match="pass a list of"):
        build.completion_request(given, "m", {})


def test_a_chat_is_a_list() -> None:
    message: Any = {"role": "user", "content": "hi"}
    with pytest.raises(TypeError, match="messages is a dict"):
        build.chat_messages(message)
    with pytest.raises(TypeError, match="content is a dict"):
        build.chat_messages([{**message, "content": {"type": "text"}}])


def test_a_message_without_a_role_is_refused() -> None:
    with pytest.raises(ValueError, match="role is 'robot'"):
        build.chat_messages([{"role": "robot", "content": "hi"}])
    with pytest.raises(ValueError, match="image_url"):
        build.chat_messages([{"role": "user", "content": [{"type": "image_url"}]}])


def test_every_field_of_the_contract_has_an_argument() -> None:
    known = build.ChatFields.__optional_keys__ | build.CompletionFields.__optional_keys__
    assert set(pb.Sampling.DESCRIPTOR.fields_by_name) <= known
    assert set(pb.ServiceLevel.DESCRIPTOR.fields_by_name) <= known
    assert set(pb.Structure.DESCRIPTOR.fields_by_name) <= known
    assert set(pb.Options.DESCRIPTOR.fields_by_name) - {"service_level"} <= known
