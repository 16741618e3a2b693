"""Parses bodies of OpenAI's Responses API and converts them to chats. The server stores nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from services.gateway.api.chat import BodyFields, ChatRequest
from services.gateway.api.conversation import CALLS_MAX, MESSAGES_MAX
from services.gateway.api.field_names import FieldNames
from services.gateway.api.parameters import CHAT, Policy, RefusedField, UnknownFields
from services.gateway.api.tools import CHOICE_FORM, TOOL_FORM
from services.gateway.api.validation import Strict, validated
from services.gateway.vocabulary.errors import BadRequest, NotSupported

Chat = dict[str, Any]
PATH = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
_ITEMS = frozenset({"message", "reasoning", "function_call", "function_call_output"})


class _InputPart(BaseModel):
    """A part of the input; ignores unknown fields, which clients echo from earlier responses."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class TextPart(_InputPart):
    """Text of any role."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(_InputPart):
    """A model's refusal to answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The text of the refusal."""
        return self.refusal


def _parts(value: Any) -> Any:
    """Convert a string to a text part; refuse unsupported parts."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    for part in parts if isinstance(parts, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ("input_image", "input_file", "input_audio"):
            raise NotSupported(
                f"parts of type '{kind}' are not supported yet; send text", param="input"
            )
    return parts


CallId = Annotated[str, Field(min_length=1, max_length=256)]
Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], BeforeValidator(_parts)]


class MessageItem(_InputPart):
    """A message."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class ReasoningItem(_InputPart):
    """The model's reasoning in an earlier turn."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None


class CallItem(_InputPart):
    """A function call of the model."""

    type: Literal["function_call"]
    call_id: CallId
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class OutputItem(_InputPart):
    """The output of a function."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: Parts


def _items(value: Any) -> Any:
    """Convert a string to a user message, and items without a type to messages."""
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
            "'item_reference' is not supported, as the server stores no items; send the item",
            param="input",
        )
    if isinstance(kind, str) and kind not in _ITEMS:
        raise NotSupported(
            f"input items of type {kind[:64]!a} are not supported; send messages, function calls"
            " and their outputs",
            param="input",
        )
    return item


Item = Annotated[MessageItem | ReasoningItem | CallItem | OutputItem, Field(discriminator="type")]


class TextConfig(_InputPart):
    """The format of the output text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(_InputPart):
    """The reasoning effort."""

    effort: str | None = None


class ResponsesRequest(Strict):
    """Body of /v1/responses."""

    model: str
    input: Annotated[
        list[Item], BeforeValidator(_items), Field(min_length=1, max_length=MESSAGES_MAX)
    ]
    instructions: str | None = Field(None, description="System message before the input.")
    max_output_tokens: int | None = Field(None, description="Maximum output tokens.")
    tools: list[dict[str, Any]] | None = Field(None, description="Functions of the client.")
    tool_choice: str | dict[str, Any] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = Field(
        None, description="Effort. Reasoning is sent as text, never as a summary."
    )
    include: list[str] | None = Field(
        None, description=f"{LOGPROBS}; other values belong to unsupported tools."
    )
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: a prompt that is too long is truncated at its beginning."
    )
    metadata: dict[str, str] | None = Field(None, description="Echoed in the response.")

    def chat(self) -> Chat:
        """The fields of the equivalent chat."""
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
        # `verbosity` is not a chat field: the chat's policy refuses unsupported values.
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
            "context_management": "the server does not edit the context",
            "max_tool_calls": "tools run at the client",
            "stream_options": "events are not padded",
        },
        refused={
            **CHAT.refused,
            "background": RefusedField("a response is sent with its request only", (False,)),
            "conversation": RefusedField("nothing is stored; send the whole input"),
            "previous_response_id": RefusedField("nothing is stored; send the whole input"),
            "prompt": RefusedField("no prompt templates are stored"),
        },
    ),
    names=FieldNames(
        {
            "messages": "input",
            "max_completion_tokens": "max_output_tokens",
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
            "response_format": "text.format",
            "response_format.json_schema": "text.format",
            "verbosity": "text.verbosity",
            "tool_call_id": "call_id",
            "tool_calls": "function_call",
        },
        {
            TOOL_FORM: "{'type': 'function', 'name': …}",
            CHOICE_FORM: "{'type': 'function', 'name': …}",
            "in the messages": "in the input",
        },
    ),
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
    """The equivalent `chat`, and `echoed`: the fields of the body that the response repeats.

    Long fields are already encoded, `size_bytes` in total, because objects take much more memory.
    """

    echoed: Mapping[str, Any]
    size_bytes: int
    chat: ChatRequest


def _encoded(value: Any, param: str) -> msgspec.Raw:
    """Encode an echoed field. Raises BadRequest if it is not valid Unicode."""
    try:
        return msgspec.Raw(msgspec.json.encode(value))
    except UnicodeEncodeError:
        raise BadRequest(
            f"'{param}' has a lone surrogate, which is not a character; send valid Unicode",
            param=param,
        ) from None


def parse_responses(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> PreparedResponse:
    """Parse a body of /v1/responses.

    Raises:
        BadRequest: if a field is invalid.
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
    # Encode now, so that the parsed body can be freed before the generation.
    encoded = {name: _encoded(value, name) for name, value in long.items()}
    echoed = {
        "max_output_tokens": body.max_output_tokens,
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
        **encoded,
    }
    chat = FIELDS.chat(rest | body.chat(), unknown)
    return PreparedResponse(echoed, sum(map(len, map(bytes, encoded.values()))), chat)


def _chat_messages(instructions: str | None, items: Iterable[Item]) -> list[Chat]:
    messages: list[Chat] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    # Merge consecutive items of the assistant: templates expect a message per turn.
    turn = _Turn()
    for item in items:
        if turn.try_add(item):
            continue
        messages += turn.messages()
        turn = _Turn()
        match item:
            case OutputItem():
                output = _joined(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case MessageItem(role="assistant") | ReasoningItem() | CallItem():
                turn.try_add(item)
            case MessageItem():
                messages.append({"role": item.role, "content": _joined(item.content)})
    return messages + turn.messages()


class _Turn:
    """Items that form a single assistant message: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[Chat] = []

    def try_add(self, item: Item) -> bool:
        """Add the item if it belongs to the same message; return whether it does."""
        match item:
            case ReasoningItem() if not (self._reasoning or self._content or self._calls):
                self._reasoning = _joined(item.content or item.summary or ())
            case MessageItem(role="assistant") if self._content is None and not self._calls:
                self._content = _joined(item.content)
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                self._calls.append(call)
                if len(self._calls) > CALLS_MAX:
                    raise BadRequest(
                        f"more than {CALLS_MAX} items 'function_call' follow each other; put their"
                        " outputs between them",
                        param="input",
                    )
            case _:
                return False
        return True

    def messages(self) -> list[Chat]:
        """The message; empty for a turn without text and calls."""
        if self._content is None and not self._calls:
            # Omit reasoning without text and calls, which is of no use to the model.
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
    """Convert a function, or a choice of a function, to the chat's nested form."""
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
