"""The messages of a chat: checks, and conversion for chat templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.api.parameters import UnknownFields
from services.gateway.api.prompts import Content
from services.gateway.vocabulary.errors import BadRequest, NotSupported

PARAM = "messages"
MESSAGES_MAX = 4096
"""Maximum messages of a chat."""
MESSAGE_CHARS = 64
"""Cost of tokenizing an empty message, in characters of text."""
CALLS_MAX = 128
"""Maximum tool calls in a message."""

# Ignored fields: clients echo fields of earlier responses.
_IGNORED = ("name",)
_UNSUPPORTED = ("annotations", "audio", "function_call", "refusal")


class _Part(BaseModel):
    """A part of a message; ignores unknown fields, which clients echo from earlier responses."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class CalledFunction(_Part):
    """The name and the arguments of a call; the arguments are JSON text of the model."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = "{}"

    def parsed(self) -> Any:
        """The arguments for templates: an object, or the text if it is not a JSON object."""
        # Accept invalid JSON: a truncated call of an earlier turn must not fail the request.
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return arguments if isinstance(arguments, dict) else self.arguments


class ToolCall(_Part):
    """A tool call of the model."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """A message of a chat."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="Optional with tool_calls.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=CALLS_MAX)] | None = Field(
        None, description="The assistant's calls, as in its response."
    )
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="The call that a message of role tool answers."
    )
    reasoning: str | None = Field(
        None, description="The assistant's reasoning; some templates include it."
    )
    reasoning_content: str | None = Field(None, description="The older name of reasoning.")

    @property
    def size(self) -> int:
        """The approximate cost of tokenizing the message, in characters of text."""
        calls = sum(MESSAGE_CHARS + len(call.function.arguments) for call in self.tool_calls or ())
        reasoning = self.reasoning or self.reasoning_content or ""
        return MESSAGE_CHARS + len(self.content or "") + len(reasoning) + calls


def check_count(messages: Sequence[Any]) -> None:
    """Raise BadRequest if there are too many messages. Call it before parsing them."""
    if len(messages) > MESSAGES_MAX:
        raise _invalid(
            f"the chat has {len(messages)} messages, the maximum is {MESSAGES_MAX}; send fewer"
        )


def plain_message(message: Any, unknown: UnknownFields) -> Any:
    """The message without ignored fields; raises NotSupported for unsupported fields."""
    if not isinstance(message, dict):
        return message
    kept = {}
    for name, value in message.items():
        if name in _UNSUPPORTED:
            if value not in (None, [], ""):
                raise NotSupported(
                    f"'{name}' in a message is not supported yet; omit it", param=PARAM
                )
        elif name in Message.model_fields:
            kept[name] = value
        elif name not in _IGNORED:
            unknown.add(name, PARAM, Message.model_fields)
    if kept.get("role") == "function":
        raise NotSupported(
            "messages of role 'function' are not supported; use role 'tool'", param=PARAM
        )
    return kept


def check_conversation(messages: Sequence[Message]) -> None:
    """Raise BadRequest if a message does not match its role or the preceding messages."""
    called: set[str] = set()
    for message in messages:
        if message.role == "tool":
            _check_tool_result(message, called)
        elif message.tool_call_id is not None:
            raise _invalid("'tool_call_id' is only valid in messages of role 'tool'; omit it")
        if message.tool_calls and message.role != "assistant":
            raise _invalid("'tool_calls' are only valid in messages of role 'assistant'; omit them")
        if message.content is None and not message.tool_calls:
            raise _invalid(f"a message of role '{message.role}' has no content; send text")
        # Add the calls after the check, since a result must follow its call.
        called.update(call.id for call in message.tool_calls or ())


def _check_tool_result(message: Message, called: set[str]) -> None:
    if message.tool_call_id is None:
        raise _invalid("a message of role 'tool' needs the 'tool_call_id' that it answers")
    if message.tool_call_id not in called:
        raise _invalid(
            f"'tool_call_id' {json.dumps(message.tool_call_id[:64])} matches no call in an earlier"
            " message; include the assistant's message with its 'tool_calls'"
        )


def _invalid(message: str) -> BadRequest:
    return BadRequest(message, param=PARAM)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages in the form of chat templates.

    Converts the role "developer" to "system" and arguments to objects, and adds the tools' names to
    their results.
    """
    names: dict[str, str] = {}
    converted = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        converted.append(_template_message(message, names))
    return converted


def _template_message(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    # Templates support only the older role "system".
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.tool_call_id is not None:
        fields |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.parsed()},
            }
            for call in message.tool_calls
        ]
    if reasoning := message.reasoning or message.reasoning_content:
        fields["reasoning_content"] = reasoning
    return fields
