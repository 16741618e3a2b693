"""The messages of a chat: their checks, and their form for templates."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.api.parameters import UnknownFields
from services.gateway.api.prompts import Content
from services.gateway.vocabulary.errors import BadRequest, NotSupported

PARAM = "messages"
MESSAGES_MAX = 4096
"""Most messages of a chat."""
MESSAGE_CHARS = 64
"""Cost of an empty message, in characters of text."""
CALLS_MAX = 128
"""Most calls in one message."""

# Fields without a meaning here; clients send back fields of earlier answers.
_HARMLESS = ("name",)
_UNSUPPORTED = ("annotations", "audio", "function_call", "refusal")


class _Part(BaseModel):
    """A part of a message; unknown fields, which clients send back, are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class CalledFunction(_Part):
    """Name and arguments of a call; the latter are JSON, as the model wrote it."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = "{}"

    def parsed(self) -> Any:
        """The arguments as templates take them: an object, or the text if it is none."""
        try:
            arguments = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return arguments if isinstance(arguments, dict) else self.arguments


class ToolCall(_Part):
    """A call that the model made."""

    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="It may lack beside tool_calls.")
    tool_calls: Annotated[list[ToolCall], Field(max_length=CALLS_MAX)] | None = Field(
        None, description="Of the assistant, as it was given them."
    )
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="The call that a message of role tool answers."
    )
    reasoning: str | None = Field(None, description="Of the assistant; templates may show it.")
    reasoning_content: str | None = Field(None, description="The older name of reasoning.")

    @property
    def size(self) -> int:
        """The approximate cost of the message in characters; every part costs some."""
        calls = sum(MESSAGE_CHARS + len(call.function.arguments) for call in self.tool_calls or ())
        reasoning = self.reasoning or self.reasoning_content or ""
        return MESSAGE_CHARS + len(self.content or "") + len(reasoning) + calls


def check_count(messages: Sequence[Any]) -> None:
    """Raise BadRequest if there are too many messages; call it before they are read."""
    if len(messages) > MESSAGES_MAX:
        raise _wrong(
            f"there are {len(messages)} messages, but {MESSAGES_MAX} are the most; send fewer"
        )


def plain_message(message: Any, unknown: UnknownFields) -> Any:
    """The message without fields that ask for nothing."""
    if not isinstance(message, dict):
        return message
    kept = {}
    for name, value in message.items():
        if name in _UNSUPPORTED:
            if value not in (None, [], ""):
                raise NotSupported(
                    f"'{name}' in a message is not supported yet; leave it out", param=PARAM
                )
        elif name in Message.model_fields:
            kept[name] = value
        elif name not in _HARMLESS:
            unknown.note(name, PARAM, Message.model_fields)
    if kept.get("role") == "function":
        raise NotSupported(
            "messages of role 'function' are not supported; use role 'tool'", param=PARAM
        )
    return kept


def check_conversation(messages: Sequence[Message]) -> None:
    """Raise BadRequest if a message does not fit its role or the messages before it."""
    called: set[str] = set()
    for message in messages:
        if message.role == "tool":
            _check_answer(message, called)
        elif message.tool_call_id is not None:
            raise _wrong("'tool_call_id' stands in messages of role 'tool' only; leave it out")
        if message.tool_calls and message.role != "assistant":
            raise _wrong("'tool_calls' stand in messages of role 'assistant' only; leave them out")
        if message.content is None and not message.tool_calls:
            raise _wrong(f"a message of role '{message.role}' has no content; send some text")
        called.update(call.id for call in message.tool_calls or ())


def _check_answer(message: Message, called: set[str]) -> None:
    if message.tool_call_id is None:
        raise _wrong("a message of role 'tool' needs the 'tool_call_id' that it answers")
    if message.tool_call_id not in called:
        raise _wrong(
            f"'tool_call_id' {message.tool_call_id[:64]!a} is of no call in an earlier message;"
            " send the assistant's message with its 'tool_calls', too"
        )


def _wrong(message: str) -> BadRequest:
    return BadRequest(message, param=PARAM)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as chat templates know them.

    "developer" is what "system" used to be; arguments of calls are objects; answers of tools have
    the names of the tools.
    """
    names: dict[str, str] = {}
    told = []
    for message in messages:
        names |= {call.id: call.function.name for call in message.tool_calls or ()}
        told.append(_template_message(message, names))
    return told


def _template_message(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.tool_call_id is not None:
        told |= {"tool_call_id": message.tool_call_id, "name": names[message.tool_call_id]}
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.parsed()},
            }
            for call in message.tool_calls
        ]
    if reasoning := message.reasoning or message.reasoning_content:
        told["reasoning_content"] = reasoning
    return told
