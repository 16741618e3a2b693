"""Requests in which every client-supplied string contains a marker that can be searched for."""

from collections.abc import Iterator
from typing import Any

MARK = "kanarie"
"""Part of every client-supplied string; lower case."""


def word(field: str) -> str:
    """A marked string for a field."""
    return f"{MARK}-{field}"


SCHEMA = {
    "type": "object",
    "properties": {word("property"): {"enum": [word("enum"), word("enum-2")]}},
    "required": [word("property")],
    "description": word("schema-description"),
}
TOOL = {
    "type": "function",
    "function": {
        "name": word("tool"),
        "description": word("tool-description"),
        "parameters": SCHEMA,
    },
}
CALL = {
    "id": word("call"),
    "type": "function",
    "function": {"name": word("tool"), "arguments": '{"x": "' + word("argument") + '"}'},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": word("system")},
    {"role": "user", "content": [{"type": "text", "text": word("user-part")}]},
    {"role": "assistant", "content": word("assistant"), "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": word("call"), "content": word("result")},
    {"role": "user", "content": word("user")},
]
WORDS: dict[str, Any] = {
    "stop": [word("stop")],
    "bad_words": [word("bad")],
    "user": word("end-user"),
    "cache_salt": word("salt"),
    "max_tokens": 3,
}
"""Fields accepted by every endpoint."""
CHAT: dict[str, Any] = {"model": "m", "messages": MESSAGES, **WORDS}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": word("prompt"), **WORDS}
FORM = {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}}


def good() -> Iterator[tuple[str, dict[str, Any]]]:
    """Endpoint ("chat" or "completion") and body of valid requests."""
    yield "chat", CHAT
    yield "chat", CHAT | {"tools": [TOOL]}
    yield "chat", CHAT | {"tools": [TOOL], "tool_choice": "required"}
    yield "chat", CHAT | {"response_format": FORM}
    yield "completion", COMPLETION
    yield "completion", COMPLETION | {"logprobs": 2, "echo": True}
    yield "completion", COMPLETION | {"structured_outputs": {"regex": word("regex")}}
    yield "completion", COMPLETION | {"structured_outputs": {"choice": [word("choice")]}}
    lark = f'start: "{word("lark")}"'
    yield "completion", COMPLETION | {"structured_outputs": {"grammar": lark}}


def refused() -> Iterator[tuple[str, dict[str, Any]]]:
    """Invalid requests, with the error mostly in or next to a marked string."""
    yield "chat", CHAT | {"model": word("model")}
    yield "chat", CHAT | {"temperature": 9}
    yield "chat", CHAT | {"messages": [{"role": "user", "content": word("long") * 200}]}
    yield "chat", CHAT | {"tools": [TOOL], "tool_choice": named(word("no-tool"))}
    broken = {"type": word("no-type")}
    form = {"type": "json_schema", "json_schema": {"name": "output", "schema": broken}}
    yield "chat", CHAT | {"response_format": form}
    yield "completion", COMPLETION | {"max_tokens": 3, "stop": [word("s")] * 17}
    yield "completion", COMPLETION | {"structured_outputs": {"regex": word("regex") + "("}}
    yield "completion", COMPLETION | {"structured_outputs": {"grammar": word("no lark")}}


def refused_json() -> Iterator[tuple[str, dict[str, Any]]]:
    """Invalid bodies that only JSON can express."""
    yield "chat", CHAT | {"messages": [{"role": word("role"), "content": word("user")}]}
    yield "chat", CHAT | {"temperature": word("temperature")}
    yield "chat", CHAT | {"chat_template_kwargs": {word("variable"): word("value")}}
    yield "chat", CHAT | {"response_format": {"type": word("type")}}
    yield "completion", COMPLETION | {"logit_bias": {word("token"): 1}}
    yield "completion", COMPLETION | {"logprobs": word("logprobs")}
    yield "completion", COMPLETION | {"request_id": word("not safe") + " "}


def named(tool: str) -> dict[str, Any]:
    """A `tool_choice` that names a function."""
    return {"type": "function", "function": {"name": tool}}
