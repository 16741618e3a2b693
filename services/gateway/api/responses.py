"""Body of OpenAI's Responses API, and the chat that it stands for. Nothing is stored."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from services.gateway.api.chat import BodyFields, ChatRequest
from services.gateway.api.conversation import MESSAGES_MAX
from services.gateway.api.parameters import CHAT, Policy, RefusedField, UnknownFields
from services.gateway.api.validation import Strict, validated
from services.gateway.vocabulary.errors import BadRequest, NotSupported

Chat = dict[str, Any]
PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
_ITEMS = frozenset({"message", "reasoning", "function_call", "function_call_output"})


class _InputPart(BaseModel):
    """A part of the input; unknown fields, which clients send back, are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class TextPart(_InputPart):
    """Text of any role."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(_InputPart):
    """What a model said in the place of an answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


def _parts(value: Any) -> Any:
    """A string is one part of text."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ("input_image", "input_file", "input_audio"):
            raise NotSupported(
                f"parts of type '{kind}' are not supported yet; send text", param="input"
            )
    return parts


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], BeforeValidator(_parts)]


class MessageItem(_InputPart):
    """A message."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class ReasoningItem(_InputPart):
    """What the model thought in an earlier turn."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class CallItem(_InputPart):
    """The model called a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(_InputPart):
    """What a function answered."""

    type: Literal["function_call_output"]
    call_id: str
    output: Parts


def _items(value: Any) -> Any:
    """A string is one message of the user; an item without a type is a message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return [_typed(item) for item in value] if isinstance(value, list) else value


def _typed(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    kind = item.get("type")
    if kind is None:
        return {**item, "type": "message"}
    if kind == "item_reference":
        raise NotSupported(
            "nothing is stored that 'item_reference' could name; send the item itself",
            param="input",
        )
    if isinstance(kind, str) and kind not in _ITEMS:
        raise NotSupported(
            f"input items of type {kind[:64]!a} are not supported; send messages, and functions"
            " with their outputs",
            param="input",
        )
    return item


Item = Annotated[MessageItem | ReasoningItem | CallItem | OutputItem, Field(discriminator="type")]


class TextConfig(_InputPart):
    """The form of the text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(_InputPart):
    """How much the model thinks before it answers."""

    effort: str | None = None


class ResponsesRequest(Strict):
    """Body of /v1/responses."""

    model: str
    input: Annotated[
        list[Item], BeforeValidator(_items), Field(min_length=1, max_length=MESSAGES_MAX)
    ]
    instructions: str | None = Field(None, description="What comes before the input, of system.")
    max_output_tokens: int | None = Field(None, description="Most output tokens.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions of the client.")
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = Field(
        None, description="Effort; what is thought is sent as it is, without a summary."
    )
    include: list[str] | None = Field(
        None, description=f"{LOGPROBS}; others are of tools that are not served."
    )
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: a prompt that is too long loses its beginning."
    )
    metadata: dict[str, str] | None = Field(None, description="Comes back with the response.")

    def chat(self) -> Chat:
        """The fields of the chat that it stands for."""
        fields: Chat = {
            "model": self.model,
            "messages": _chat_messages(self.instructions, self.input),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [_nested(tool) for tool in self.tools],
            "tool_choice": _tool_choice(self.tool_choice),
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
        }
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            fields["response_format"] = _response_format(self.text.format)
            fields["verbosity"] = self.text.verbosity
        return {name: value for name, value in fields.items() if value is not None}


FIELDS = BodyFields(
    own=frozenset(ResponsesRequest.model_fields),
    policy=Policy(
        limits=("max_output_tokens",),
        ignored={
            **CHAT.ignored,
            "context_management": "the context is as it is sent",
            "max_tool_calls": "tools run at the client",
            "stream_options": "nothing is padded",
        },
        refused={
            **CHAT.refused,
            "background": RefusedField("a response comes with its request", (False,)),
            "conversation": RefusedField("nothing is stored; send all of it as input"),
            "previous_response_id": RefusedField("nothing is stored; send all of it as input"),
            "prompt": RefusedField("no templates are stored"),
        },
    ),
    names={
        # Others have other places there.
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        "response_format": "text.format",
        "verbosity": "text.verbosity",
    },
    absent=frozenset(
        {
            "add_generation_prompt",
            "best_of",
            "continue_final_message",
            "logprobs",
            "n",
            "prompt_logprobs",
            "return_token_ids",
            "return_tokens_as_token_ids",
        }
    ),
)


@dataclass(frozen=True, slots=True)
class PreparedResponse:
    """`chat` is what is generated; `repeated` are fields of the body that the response repeats.

    Long parts are JSON already, `size_bytes` in all: as objects they would take much more.
    """

    repeated: Mapping[str, Any]
    size_bytes: int
    chat: ChatRequest


def _written(value: Any, param: str) -> msgspec.Raw:
    """A field as the response repeats it; raises BadRequest if it cannot."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except UnicodeEncodeError:
        raise BadRequest(
            f"'{param}' holds a lone surrogate, which is no character; send valid Unicode",
            param=param,
        ) from None


def parse_responses(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> PreparedResponse:
    """What a body of /v1/responses asks for.

    Raises:
        BadRequest: if a field is wrong.
    """
    unknown = UnknownFields(refuse_unknown)
    own, rest = FIELDS.split(data, unknown)
    body = validated(ResponsesRequest, own)
    text = {"format": {"type": "text"}}
    if isinstance(given := own.get("text"), dict):
        text |= {name: value for name, value in given.items() if value is not None}
    long = {
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "text": text,
        "tool_choice": own.get("tool_choice") or "auto",
        "tools": own.get("tools") or [],
    }
    written = {name: _written(value, name) for name, value in long.items()}
    repeated = {
        "max_output_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        **written,
    }
    chat = FIELDS.chat(rest | body.chat(), unknown)
    return PreparedResponse(repeated, sum(map(len, map(bytes, written.values()))), chat)


def _chat_messages(instructions: str | None, items: Iterable[Item]) -> list[Chat]:
    messages: list[Chat] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn = _Turn()
    for item in items:
        if turn.takes(item):
            continue
        messages += turn.messages()
        turn = _Turn()
        match item:
            case OutputItem():
                output = _joined(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case MessageItem(role="assistant") | ReasoningItem() | CallItem():
                turn.takes(item)
            case MessageItem():
                messages.append({"role": item.role, "content": _joined(item.content)})
    return messages + turn.messages()


class _Turn:
    """Items that together are one message of the assistant: thoughts, then text, then calls."""

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[Chat] = []

    def takes(self, item: Item) -> bool:
        """Whether the item is part of the same message, which then has it."""
        match item:
            case ReasoningItem() if not (self._reasoning or self._content or self._calls):
                self._reasoning = _joined(item.content or item.summary or ())
            case MessageItem(role="assistant") if self._content is None and not self._calls:
                self._content = _joined(item.content)
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._calls.append(call)
            case _:
                return False
        return True

    def messages(self) -> list[Chat]:
        """The message, if there is any."""
        if self._content is None and not self._calls:
            # Thoughts that led to nothing are of no use to the model.
            return []
        message: Chat = {"role": "assistant", "content": self._content}
        if self._calls:
            message["tool_calls"] = self._calls
        if self._reasoning:
            message["reasoning"] = self._reasoning
        return [message]


def _joined(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts)


def _nested(tool: Chat) -> Chat:
    """A function, or a choice of one, as the chat has it."""
    if tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}


def _tool_choice(choice: str | Chat | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "allowed_tools":
        return _nested(choice)
    tools = choice.get("tools")
    if isinstance(tools, list):
        tools = [_nested(tool) if isinstance(tool, dict) else tool for tool in tools]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}


def _response_format(form: Chat | None) -> Chat | None:
    if form is None or form.get("type") != "json_schema":
        return form
    schema = {name: value for name, value in form.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}
