"""Body of Anthropic's Messages API, and the chat that it stands for."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from services.gateway.api.chat import BodyFields, ChatRequest
from services.gateway.api.conversation import MESSAGES_MAX
from services.gateway.api.parameters import CHAT, Policy, RefusedField, UnknownFields
from services.gateway.api.validation import Strict, validated
from services.gateway.vocabulary.errors import BadRequest, NotSupported

Chat = dict[str, Any]
THREAD = "thread"
"""Clients may ask the server to keep a conversation."""
_UNSERVED_BLOCKS = frozenset(
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
    """A part of a message; hints for caches and the like may stand in it, too."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class Text(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """What the model thought in an earlier turn."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(_Block):
    """Thoughts in a form that only the server that wrote them can read."""

    type: Literal["redacted_thinking"]


class ToolUse(_Block):
    """The model called a tool."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1)]
    name: str
    input: dict[str, Any]


def _blocks(value: Any) -> Any:
    """A string is one block of text."""
    blocks = [{"type": "text", "text": value}] if isinstance(value, str) else value
    for block in blocks if isinstance(blocks, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _UNSERVED_BLOCKS:
            raise NotSupported(
                f"blocks of type '{kind}' are not supported yet; send text", param="messages"
            )
    return blocks


Texts = Annotated[list[Text], BeforeValidator(_blocks)]


class ToolResult(_Block):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1)]
    content: Texts | None = None


Block = Annotated[
    Text | ThinkingBlock | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")
]
Blocks = Annotated[list[Block], BeforeValidator(_blocks)]


class MessageParam(_Block):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class MessagesTool(_Block):
    """A tool of the client."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(_Block):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(_Block):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputFormat(_Block):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(_Block):
    """Form and effort of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


def _tools(value: Any) -> Any:
    for tool in value if isinstance(value, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise NotSupported(
                f"tools of type {kind[:64]!a} run on no server here; declare them with a name and"
                " an 'input_schema', and run them yourself",
                param="tools",
            )
    return value


class CountTokensRequest(Strict):
    """Body of /v1/messages/count_tokens: what of a message becomes its prompt."""

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: Texts | None = Field(None, description="The text before the first message.")
    tools: Annotated[list[MessagesTool], BeforeValidator(_tools)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = Field(
        None, description="For models that can do without: disabled or not. Budgets are ignored."
    )
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="As output_config.format.")

    def chat(self) -> Chat:
        """The fields of the chat that it stands for."""
        fields: Chat = {"model": self.model, "messages": _chat_messages(self)}
        if self.messages[-1].role == "assistant":
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

    max_tokens: int = Field(description="Most output tokens, thoughts included.")
    stop_sequences: list[str] | None = Field(None, description="Ends the output before it.")
    service_tier: (
        Literal["auto", "standard_only", "default", "scale", "flex", "priority"] | None
    ) = Field(
        None,
        description="standard_only: class standard; the others as in a chat. The answer's usage"
        " tells the tier that was used.",
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
            "cache_control": "prefixes are cached by themselves",
            "context_management": "the context is as it is sent",
            "diagnostics": "what the prefix cache did is told only in usage",
            "inference_geo": "the cluster is where it is",
            "speed": "there is one",
            "user_profile_id": "it is not used",
            "workspace_id": "it is not used",
        },
        refused={
            **CHAT.refused,
            "container": RefusedField("no code is run"),
            "mcp_servers": RefusedField("tools run at the client", ([],)),
            THREAD: RefusedField("nothing is stored; send all messages"),
        },
    ),
    names={
        # Others have other places there.
        "messages": "messages",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "max_completion_tokens": "max_tokens",
        "continue_final_message": "messages",
        "enable_thinking": "thinking",
        "add_generation_prompt": "messages",
        "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    },
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
    """The chat that a body of /v1/messages asks for; see `parse_chat`."""
    return _parse(MessagesRequest, data, UnknownFields(refuse_unknown))


def parse_count(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> ChatRequest:
    """The chat whose tokens a body of /v1/messages/count_tokens wants counted."""
    only_of_answers = MessagesRequest.model_fields.keys() - CountTokensRequest.model_fields.keys()
    asked = {name: value for name, value in data.items() if name not in only_of_answers}
    return _parse(CountTokensRequest, asked, UnknownFields(refuse_unknown))


def _parse(
    kind: type[CountTokensRequest], data: Mapping[str, Any], unknown: UnknownFields
) -> ChatRequest:
    own, rest = FIELDS.split(data, unknown)
    fields = validated(kind, own).chat()
    return FIELDS.chat(rest | fields, unknown)


def _chat_messages(body: CountTokensRequest) -> list[Chat]:
    messages: list[Chat] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system)})
    for message in body.messages:
        match message.role:
            case "user":
                messages += _user_messages(message)
            case "assistant":
                messages.append(_assistant_message(message))
            case "system":
                texts = [_text(block, "system") for block in message.content]
                messages.append({"role": "system", "content": _joined(texts)})
    return messages


def _user_messages(message: MessageParam) -> Iterable[Chat]:
    """Results of tools are messages of their own there."""
    texts: list[Text] = []
    for block in message.content:
        if not isinstance(block, ToolResult):
            texts.append(_text(block, "user"))
            continue
        if texts:
            yield {"role": "user", "content": _joined(texts)}
            texts = []
        content = _joined(block.content or ())
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if texts or not message.content:
        yield {"role": "user", "content": _joined(texts)}


def _assistant_message(message: MessageParam) -> Chat:
    told: Chat = {"role": "assistant", "content": ""}
    for block in message.content:
        match block:
            case Text():
                told["content"] += block.text
            case ThinkingBlock():
                told["reasoning"] = told.get("reasoning", "") + block.thinking
            case ToolUse():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                call = {"id": block.id, "type": "function", "function": function}
                told.setdefault("tool_calls", []).append(call)
            case ToolResult():
                _text(block, "assistant")
    return told


def _text(block: Block, role: str) -> Text:
    if not isinstance(block, Text):
        raise BadRequest(
            f"blocks of type '{block.type}' stand in no message of role '{role}'; move it",
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
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        case _:
            fields["tool_choice"] = choice.type
    return fields
