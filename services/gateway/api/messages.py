"""Parses bodies of Anthropic's Messages API and converts them to chats."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from services.gateway.api.chat import BodyFields, ChatRequest
from services.gateway.api.conversation import CALLS_MAX, MESSAGES_MAX
from services.gateway.api.field_names import FieldNames
from services.gateway.api.fields import is_text
from services.gateway.api.parameters import CHAT, Policy, RefusedField, UnknownFields
from services.gateway.api.tools import CHOICE_FORM
from services.gateway.api.validation import Strict, validated
from services.gateway.vocabulary.errors import BadRequest, NotSupported

Chat = dict[str, Any]
THREAD = "thread"
"""The field of a conversation stored at the server, which is not supported."""
_UNSUPPORTED_BLOCKS = frozenset(
    {
        "bash_code_execution_tool_result",
        "code_execution_tool_result",
        "container_upload",
        "document",
        "image",
        "mcp_tool_result",
        "mcp_tool_use",
        "search_result",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_reference",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)


class _Block(BaseModel):
    """A block of a message; ignores unknown fields, such as hints for caches."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class Text(_Block):
    """A text block."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """The model's reasoning in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(_Block):
    """Encrypted reasoning of another server; it is ignored."""

    type: Literal["redacted_thinking"]


_REASONING = (ThinkingBlock, RedactedThinking)


class ToolUse(_Block):
    """A tool call of the model."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: dict[str, Any]


def _blocks(value: Any) -> Any:
    """Convert a string to a text block; refuse unsupported blocks."""
    blocks = [{"type": "text", "text": value}] if isinstance(value, str) else value
    for block in blocks if isinstance(blocks, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _UNSUPPORTED_BLOCKS:
            raise NotSupported(
                f"blocks of type '{kind}' are not supported yet; send text", param="messages"
            )
    return blocks


Texts = Annotated[list[Text], BeforeValidator(_blocks)]


class ToolResult(_Block):
    """The result of a tool."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Texts | None = None


Block = Annotated[
    Text | ThinkingBlock | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")
]
Blocks = Annotated[list[Block], BeforeValidator(_blocks)]


class MessageParam(_Block):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(_Block):
    """A tool that runs at the client."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(_Block):
    """The choice of tools to call."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(_Block):
    """The switch of reasoning."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(_Block):
    """The schema of the output text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Block):
    """The format and the reasoning effort of the output."""

    effort: str | None = None
    format: OutputFormat | None = None


def _tools(value: Any) -> Any:
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise NotSupported(
                f"server tools of type {kind[:64]!a} are not supported; declare a tool with a name"
                " and an 'input_schema', and run it at the client",
                param="tools",
            )
    return value


class CountTokensRequest(Strict):
    """Body of /v1/messages/count_tokens: the fields that affect the prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: Texts | None = Field(None, description="System message before the first message.")
    tools: Annotated[list[MessagesTool], BeforeValidator(_tools)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = Field(
        None,
        description="disabled switches reasoning off, if the model supports it; other types enable"
        " it. Budgets are ignored.",
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(
        None, description="Older name of output_config.format."
    )

    def chat(self) -> Chat:
        """The fields of the equivalent chat."""
        messages = _without_empty_end(self.messages)
        fields: Chat = {"model": self.model, "messages": _chat_messages(self.system, messages)}
        # Prefill: the model continues the text of a final message of the assistant.
        if messages and messages[-1].role == "assistant" and not _calls(messages[-1]):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools is not None:
            fields["tools"] = [_function(tool) for tool in self.tools]
        if self.tool_choice is not None:
            fields |= _tool_choice(self.tool_choice)
        if self.thinking is not None:
            fields["enable_thinking"] = self.thinking.type != "disabled"
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            fields["reasoning_effort"] = config.effort
        form = config.format or self.output_format
        if form is not None:
            schema = {"name": "output", "schema": form.schema_, "strict": True}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: int = Field(description="Maximum output tokens, reasoning included.")
    stop_sequences: list[str] | None = Field(
        None,
        description="Strings that end the answer; not part of it, and not searched in the"
        " reasoning.",
    )
    service_tier: (
        Literal["auto", "standard_only", "default", "scale", "flex", "priority"] | None
    ) = Field(
        None,
        description="standard_only: class standard; other values as in a chat. The usage in the"
        " response reports the tier used.",
    )

    def chat(self) -> Chat:
        fields = super().chat() | {"max_tokens": self.max_tokens}
        if (tier := self.service_tier) is not None:
            fields["service_tier"] = "default" if tier == "standard_only" else tier
        return fields if self.stop_sequences is None else fields | {"stop": self.stop_sequences}


FIELDS = BodyFields(
    own=frozenset(MessagesRequest.model_fields),
    policy=Policy(
        limits=("max_tokens",),
        ignored={
            **CHAT.ignored,
            "cache_control": "prefixes are cached automatically",
            "context_management": "the server does not edit the context",
            "diagnostics": "usage is the only report about the prefix cache",
            "inference_geo": "a cluster has a single location",
            "speed": "there is a single speed",
            "user_profile_id": "it is not used",
            "workspace_id": "it is not used",
        },
        refused={
            **CHAT.refused,
            "container": RefusedField("the server runs no code"),
            "mcp_servers": RefusedField("tools run at the client", ([],)),
            THREAD: RefusedField("nothing is stored; send all messages"),
        },
    ),
    names=FieldNames(
        {
            "stop": "stop_sequences",
            "response_format": "output_config.format",
            "response_format.json_schema": "output_config.format",
            "reasoning_effort": "output_config.effort",
            "max_completion_tokens": "max_tokens",
            "continue_final_message": "messages",
            "enable_thinking": "thinking",
            "add_generation_prompt": "messages",
            "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
            "tool_call_id": "tool_use_id",
            "tool_calls": "tool_use",
        },
        {
            CHOICE_FORM: "{'type': 'tool', 'name': …}",
            "send 'continue_final_message': false": "end with a message of the user",
        },
    ),
    absent=frozenset(
        {
            "best_of",
            "include_stop_str_in_output",
            "logprobs",
            "n",
            "prompt_logprobs",
            "return_token_ids",
            "return_tokens_as_token_ids",
            "stream_options",
            "top_logprobs",
        }
    ),
)


def parse_messages(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> ChatRequest:
    """Parse a body of /v1/messages as a chat; see `parse_chat`."""
    return _parse(MessagesRequest, data, UnknownFields(refuse_unknown))


def parse_count(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> ChatRequest:
    """Parse a body of /v1/messages/count_tokens as a chat."""
    # Ignore the fields that only affect the output.
    output_fields = MessagesRequest.model_fields.keys() - CountTokensRequest.model_fields.keys()
    fields = {name: value for name, value in data.items() if name not in output_fields}
    return _parse(CountTokensRequest, fields, UnknownFields(refuse_unknown))


def _parse(
    kind: type[CountTokensRequest], data: Mapping[str, Any], unknown: UnknownFields
) -> ChatRequest:
    own, rest = FIELDS.split(data, unknown)
    fields = validated(kind, own).chat()
    return FIELDS.chat(rest | fields, unknown)


def _without_empty_end(messages: Sequence[MessageParam]) -> Sequence[MessageParam]:
    """The messages without messages of the assistant at the end that have no text and no calls."""
    end = len(messages)
    while end and messages[end - 1].role == "assistant" and _is_empty(messages[end - 1]):
        end -= 1
    return messages[:end]


def _is_empty(message: MessageParam) -> bool:
    # Reasoning alone is of no use: the model cannot continue it.
    blocks = (block for block in message.content if not isinstance(block, _REASONING))
    return not any(not isinstance(block, Text) or block.text for block in blocks)


def _calls(message: MessageParam) -> int:
    return sum(isinstance(block, ToolUse) for block in message.content)


def _chat_messages(system: Sequence[Text] | None, messages: Iterable[MessageParam]) -> list[Chat]:
    converted: list[Chat] = []
    if system:
        text = _joined(system)
        if not is_text(text):
            raise BadRequest(
                "'system' contains a lone surrogate; send valid Unicode", param="system"
            )
        converted.append({"role": "system", "content": text})
    for message in messages:
        match message.role:
            case "user":
                converted += _user_messages(message)
            case "assistant":
                converted.append(_assistant_message(message))
            case "system":
                texts = [_text(block, "system") for block in message.content]
                converted.append({"role": "system", "content": _joined(texts)})
    return converted


def _user_messages(message: MessageParam) -> Iterable[Chat]:
    """The user's text, and each tool result as a separate message of role tool."""
    texts: list[Text] = []
    for block in message.content:
        if not isinstance(block, ToolResult):
            texts.append(_text(block, "user"))
            continue
        # Preserve the order of text and results: a result ends the text before it.
        if texts:
            yield {"role": "user", "content": _joined(texts)}
            texts = []
        content = _joined(block.content or ())
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    # Results alone need no further message of role user.
    if texts or not message.content:
        yield {"role": "user", "content": _joined(texts)}


def _assistant_message(message: MessageParam) -> Chat:
    if _calls(message) > CALLS_MAX:
        raise BadRequest(
            f"a message has more than {CALLS_MAX} 'tool_use' blocks; split it", param="messages"
        )
    fields: Chat = {"role": "assistant", "content": ""}
    for block in message.content:
        match block:
            case Text():
                fields["content"] += block.text
            case ThinkingBlock():
                fields["reasoning"] = fields.get("reasoning", "") + block.thinking
            case ToolUse():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                call = {"id": block.id, "type": "function", "function": function}
                fields.setdefault("tool_calls", []).append(call)
            case ToolResult():
                # Raises: a result is invalid in this role.
                _text(block, "assistant")
    return fields


def _text(block: Block, role: str) -> Text:
    if not isinstance(block, Text):
        raise BadRequest(
            f"blocks of type '{block.type}' are invalid in messages of role '{role}'; move it",
            param="messages",
        )
    return block


def _joined(texts: Iterable[Text]) -> str:
    return "".join(block.text for block in texts)


def _function(tool: MessagesTool) -> Chat:
    function: Chat = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> Chat:
    fields: Chat = {}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    match choice.type:
        case "any":
            fields["tool_choice"] = "required"
        case "tool":
            if choice.name is None:
                raise BadRequest("'tool_choice.name' is missing; send it", param="tool_choice.name")
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case _:
            fields["tool_choice"] = choice.type
    return fields
