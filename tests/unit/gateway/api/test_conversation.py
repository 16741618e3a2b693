"""Messages with tool calls and results, as passed to templates."""

from typing import Any

import pytest

from services.gateway.api.chat import ChatRequest, parse_chat
from services.gateway.api.conversation import template_messages
from services.gateway.tools.tool import CallMode
from services.gateway.vocabulary.errors import BadRequest

TOOL = {"type": "function", "function": {"name": "get"}}
OTHER = {"type": "function", "function": {"name": "put"}}


def call(call_id: str, arguments: str = '{"a": 1}') -> dict[str, Any]:
    """A tool call as clients return it."""
    function = {"name": "get", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function, "index": 0}


def chat(messages: list[Any], **fields: Any) -> ChatRequest:
    """A chat body."""
    return parse_chat({"model": "m", "messages": messages} | fields)


def test_calls_and_answers_reach_the_template() -> None:
    body = chat(
        [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [call("1"), call("2", "no json")],
                "function_call": None,
            },
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "x"}]},
            {"role": "tool", "tool_call_id": "1", "content": "", "name": "get"},
        ]
    )

    function = {"name": "get", "arguments": {"a": 1}}
    broken = {"name": "get", "arguments": "no json"}
    assert template_messages(body.messages) == [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": function},
                {"id": "2", "type": "function", "function": broken},
            ],
        },
        {"role": "tool", "content": "x", "tool_call_id": "2", "name": "get"},
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "get"},
    ]


@pytest.mark.parametrize("arguments", ["", "{}", "[1]", "[" * 5000, '"x"'])
def test_non_object_arguments_stay_text(arguments: str) -> None:
    body = chat([{"role": "assistant", "tool_calls": [call("1", arguments)]}])

    (message,) = template_messages(body.messages)
    rendered = message["tool_calls"][0]["function"]["arguments"]
    assert rendered == ({} if arguments in ("", "{}") else arguments)


def test_an_answer_must_follow_its_call() -> None:
    answer = {"role": "tool", "tool_call_id": "1", "content": "x"}

    with pytest.raises(BadRequest, match="'tool_call_id' \"1\" matches no call"):
        chat([answer, {"role": "assistant", "tool_calls": [call("1")]}])


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, CallMode.AUTO, ["get", "put"]),
        ("auto", CallMode.AUTO, ["get", "put"]),
        ("none", CallMode.NONE, []),
        ("required", CallMode.REQUIRED, ["get", "put"]),
        (OTHER, CallMode.REQUIRED, ["put"]),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
            CallMode.AUTO,
            ["get"],
        ),
    ],
)
def test_tool_choice_limits_the_callable_tools(
    choice: Any, mode: CallMode, names: list[str]
) -> None:
    body = chat([{"role": "user", "content": "x"}], tools=[TOOL, OTHER], tool_choice=choice)

    assert body.call_mode is mode
    assert [tool.name for tool in body.callable_tools] == names


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_no_call_is_possible_without_tools(choice: Any) -> None:
    body = chat([{"role": "user", "content": "x"}], tools=[], tool_choice=choice)

    assert body.call_mode is CallMode.NONE


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        ({"enable_thinking": True}, {"enable_thinking": True, "thinking": True}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": True},
        ),
        ({"chat_template_kwargs": {"thinking": None, "date_string": "x"}}, {"date_string": "x"}),
    ],
)
def test_template_variables_follow_the_request(
    fields: dict[str, Any], variables: dict[str, Any]
) -> None:
    body = chat([{"role": "user", "content": "x"}], **fields)

    assert body.template_variables == variables
