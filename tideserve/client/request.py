"""Builds requests from plain Python values, in the shapes of the OpenAI API."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2 as pb

MessageLike = pb.Message | Mapping[str, Any]
Messages = str | Sequence[MessageLike]
"""A chat; a string is a single message of the user."""
PromptLike = str | Sequence[int]
Prompts = PromptLike | Sequence[PromptLike]
"""A prompt or a list of prompts; each is a text or token ids."""


def _numbers(wire: Any, prefix: str) -> dict[str, Any]:
    """Return an enumeration's values by name in lower case, without the unspecified value 0."""
    return {name.removeprefix(prefix).lower(): value for name, value in wire.items() if value}


_ROLES = _numbers(pb.Role, "ROLE_")
_MODES = _numbers(pb.ToolMode, "TOOL_MODE_")
_CLASSES = _numbers(service_pb2.ServiceClass, "SERVICE_CLASS_")


class CommonFields(TypedDict, total=False):
    """Fields of chats and completions; see gateway.proto for meanings and ranges.

    At most one of `json_object`, `json_schema`, `regex`, `lark` and `choices` may be set.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_tokens: int
    max_tokens: int
    ignore_eos: bool
    n: int
    logprobs: bool
    top_logprobs: int
    prompt_logprobs: int
    json_object: bool
    json_schema: str | Mapping[str, Any]
    regex: str
    lark: str
    choices: Sequence[str]
    request_id: str
    user: str
    cache_salt: str
    service_class: str
    priority: int
    ttft_ms: float
    tpot_ms: float


class ChatFields(CommonFields, total=False):
    """Further fields of chats. Tools are in the form of the OpenAI API, or protobuf messages."""

    tools: Sequence[pb.Tool | Mapping[str, Any]]
    tool_choice: str | pb.ToolChoice | Mapping[str, Any]
    parallel_tool_calls: bool
    enable_thinking: bool
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]


class CompletionFields(CommonFields, total=False):
    """Further fields of completions."""

    echo: bool


class TemplateFields(TypedDict, total=False):
    """Fields of the chat template beside messages."""

    tools: Sequence[pb.Tool | Mapping[str, Any]]
    enable_thinking: bool
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]


_SAMPLING = frozenset(pb.Sampling.DESCRIPTOR.fields_by_name)
_OPTIONS = ("request_id", "user", "cache_salt", "priority")
_LEVELS = ("ttft_ms", "tpot_ms")
_LISTS = {
    "bad_words": "texts",
    "choices": "texts",
    "stop": "texts",
    "allowed_token_ids": "token ids",
    "stop_token_ids": "token ids",
}
"""Fields that are lists, and the type of their elements."""


def chat_request(messages: Messages, model: str, fields: ChatFields) -> pb.ChatRequest:
    """Build a chat request. Raises TypeError or ValueError for an unknown or invalid field."""
    known = ChatFields.__optional_keys__
    request = pb.ChatRequest(
        model=model, messages=chat_messages(messages), **_common(fields, known)
    )
    request.tools.extend(_tools(fields))
    if (choice := fields.get("tool_choice")) is not None:
        request.tool_choice.CopyFrom(_tool_choice(choice))
    if (parallel := fields.get("parallel_tool_calls")) is not None:
        request.parallel_tool_calls = parallel
    if (reasoning := reasoning_of(fields)) is not None:
        request.reasoning.CopyFrom(reasoning)
    return request


def completion_request(
    prompts: Prompts, model: str, fields: CompletionFields
) -> pb.CompleteRequest:
    """Build a completion. Raises TypeError or ValueError for an unknown or invalid field."""
    known = CompletionFields.__optional_keys__
    request = pb.CompleteRequest(
        model=model, prompts=map(_prompt, _several(prompts)), **_common(fields, known)
    )
    if (echo := fields.get("echo")) is not None:
        request.echo = echo
    return request


def tokenize_request(
    text: str | Messages, model: str, chat: bool, fields: TemplateFields
) -> pb.TokenizeRequest:
    """Build a request for the token ids of a text or, with `chat`, of rendered messages."""
    if not chat:
        if not isinstance(text, str):
            raise TypeError("text must be a string; pass chat=True for messages")
        return pb.TokenizeRequest(model=model, text=text)
    chat_input = pb.ChatInput(messages=chat_messages(text), reasoning=reasoning_of(fields))
    chat_input.tools.extend(_tools(fields))
    return pb.TokenizeRequest(model=model, chat=chat_input)


def chat_messages(messages: Messages) -> list[pb.Message]:
    """Build the messages of a chat."""
    if isinstance(messages, str):
        return [pb.Message(role=pb.ROLE_USER, text=messages)]
    listed = _list_of(messages, "messages", "messages")
    return [entry if isinstance(entry, pb.Message) else _message(entry) for entry in listed]


def _message(message: Mapping[str, Any]) -> pb.Message:
    converted = pb.Message(role=_enum_value(_ROLES, message.get("role"), "role"))
    content = message.get("content")
    if isinstance(content, str):
        converted.text = content
    elif content is not None:
        # Distinguishes an empty list of parts from an absent content.
        converted.parts.SetInParent()
        parts = _list_of(content, "content", "parts")
        converted.parts.parts.extend(pb.ContentPart(text=_part_text(part)) for part in parts)
    converted.reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    converted.tool_call_id = message.get("tool_call_id") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        converted.tool_calls.add(
            id=call.get("id", ""), name=function["name"], arguments=function.get("arguments", "")
        )
    return converted


def _part_text(part: Mapping[str, Any]) -> str:
    if part.get("type") != "text":
        raise ValueError(f"parts of type {part.get('type')!r} are not supported; send text")
    return str(part["text"])


def tool_of(tool: pb.Tool | Mapping[str, Any]) -> pb.Tool:
    """Build a tool; the schema of its parameters may be JSON text."""
    if isinstance(tool, pb.Tool):
        return tool
    # OpenAI's form nests the function; a bare function is accepted, too.
    function = tool.get("function", tool)
    converted = pb.Tool(name=function["name"], description=function.get("description") or "")
    if (parameters := function.get("parameters")) is not None:
        converted.parameters = _json(parameters)
    if (strict := function.get("strict")) is not None:
        converted.strict = strict
    return converted


def _tools(fields: Mapping[str, Any]) -> list[pb.Tool]:
    return [tool_of(tool) for tool in _list_of(fields.get("tools") or (), "tools", "tools")]


def _tool_choice(choice: str | pb.ToolChoice | Mapping[str, Any]) -> pb.ToolChoice:
    if isinstance(choice, pb.ToolChoice):
        return choice
    if isinstance(choice, str):
        return pb.ToolChoice(mode=_enum_value(_MODES, choice, "tool_choice"))
    return pb.ToolChoice(name=choice.get("function", choice)["name"])


def reasoning_of(fields: Mapping[str, Any]) -> pb.Reasoning | None:
    """Build the settings of the reasoning; None if no field sets them."""
    kwargs = fields.get("chat_template_kwargs")
    reasoning = pb.Reasoning(
        enable_thinking=fields.get("enable_thinking"),
        effort=fields.get("reasoning_effort"),
        chat_template_kwargs=None if kwargs is None else _json(kwargs),
    )
    return reasoning if reasoning.ListFields() else None


def _common(fields: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Build the parts that chats and completions share, by their field in the request."""
    if unknown := sorted(fields.keys() - known):
        raise TypeError(
            f"unknown fields {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    # None means "use the default", as in OpenAI's client.
    given = {name: value for name, value in fields.items() if value is not None}
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    for name in given.keys() & _LISTS.keys():
        _list_of(given[name], name, _LISTS[name])
    sampling = {name: value for name, value in given.items() if name in _SAMPLING}
    options = {name: given[name] for name in _OPTIONS if name in given}
    if "service_class" in given:
        options["service_class"] = _enum_value(_CLASSES, given["service_class"], "service_class")
    if levels := {name: given[name] for name in _LEVELS if name in given}:
        options["service_level"] = pb.ServiceLevel(**levels)
    parts: dict[str, Any] = {}
    if sampling:
        parts["sampling"] = pb.Sampling(**sampling)
    if options:
        parts["options"] = pb.Options(**options)
    if (structure := _structure(given)) is not None:
        parts["structure"] = structure
    return parts


def _structure(given: Mapping[str, Any]) -> pb.Structure | None:
    wanted = {
        name: given[name] for name in ("json_schema", "regex", "lark", "choices") if name in given
    }
    if given.get("json_object"):
        wanted["json_object"] = pb.JsonObject()
    if len(wanted) > 1:
        raise ValueError(f"{' and '.join(sorted(wanted))} are mutually exclusive; pass one of them")
    if "choices" in wanted:
        wanted["choices"] = pb.Choices(texts=wanted["choices"])
    if "json_schema" in wanted:
        wanted["json_schema"] = _json(wanted["json_schema"])
    return pb.Structure(**wanted) if wanted else None


def _several(prompts: Prompts) -> Sequence[PromptLike]:
    if not isinstance(prompts, str):
        _list_of(prompts, "prompts", "texts or token ids")
    # A list of integers is a single prompt of token ids.
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # no sequence of prompts
    return prompts  # type: ignore[return-value]


def _list_of(value: Any, name: str, kind: str) -> Any:
    """Return `value` unless it is a text or a mapping, which would be iterated by mistake."""
    if isinstance(value, str | bytes | bytearray | Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}; pass a list of {kind}")
    return value


def _prompt(prompt: PromptLike) -> pb.Prompt:
    if isinstance(prompt, str):
        return pb.Prompt(text=prompt)
    return pb.Prompt(token_ids=pb.TokenIds(ids=_list_of(prompt, "a prompt", "token ids")))


def _json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _enum_value(values: Mapping[str, Any], name: Any, field: str) -> Any:
    if name not in values:
        raise ValueError(f"{field} is {name!r}; pass one of {', '.join(values)}")
    return values[name]
