"""Translates protobuf requests into fields of the OpenAI API, and output into protobuf.

The HTTP and gRPC APIs share the checks of the resulting fields. This module only refuses messages
that have no equivalent in JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from google.protobuf.message import Message

from services.common.wire_enum import value_names
from services.core.request import TokenLogprobs
from services.gateway.api.field_names import FieldNames
from services.gateway.api.json_object import parse_object
from services.gateway.api.tools import CHOICE_FORM
from services.gateway.serving.output import TokenWithLogprobs, finite
from services.gateway.text.token_text import TokenTexts
from services.gateway.vocabulary.delta import AnswerAccumulator, Delta
from services.gateway.vocabulary.errors import BadRequest
from tideserve.common.v1 import service_pb2
from tideserve.gateway.v1 import gateway_pb2 as pb

Fields = dict[str, Any]

_ROLES = value_names(pb.Role, "ROLE")
_MODES = value_names(pb.ToolMode, "TOOL_MODE")
_CLASSES = value_names(service_pb2.ServiceClass, "SERVICE_CLASS")
_FINISH_REASONS = {
    name: number for number, name in value_names(pb.FinishReason, "FINISH_REASON").items()
}
# Fields of Sampling with the same form in the OpenAI API.
_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "ignore_eos",
    "n",
    "prompt_logprobs",
)
_LISTS = ("bad_words", "allowed_token_ids", "stop", "stop_token_ids")
_STRUCTURES = {"regex": "regex", "lark": "grammar"}


_SHARED = {
    "response_format": "structure.json_schema",
    "structured_outputs": "structure",
    "structured_outputs.choice": "structure.choices",
    "structured_outputs.grammar": "structure.lark",
    "slo_class": "options.service_class",
    "slo": "options.service_level",
}
_CHAT = FieldNames(
    _SHARED | {"reasoning_effort": "reasoning.effort"},
    {CHOICE_FORM: "'tool_choice.name'", ".function.": "."},
)
_COMPLETION = FieldNames(_SHARED | {"prompt": "prompts", "logprobs": "top_logprobs"})
NAMES: Mapping[str, FieldNames] = {
    "Chat": _CHAT,
    "StreamChat": _CHAT,
    "Complete": _COMPLETION,
    "StreamComplete": _COMPLETION,
    "Tokenize": FieldNames({"prompt": "text", "reasoning_effort": "chat.reasoning.effort"}),
    "Detokenize": FieldNames({"tokens": "token_ids"}),
}
"""The contract's names of fields that the HTTP API names differently, by method."""


def chat_fields(request: pb.ChatRequest) -> Fields:
    """The equivalent body of the HTTP API. Raises BadRequest."""
    fields = _common(request)
    fields["messages"] = _messages(request.messages)
    sampling = request.sampling
    fields |= _given(sampling, ("logprobs", "top_logprobs"))
    fields |= _tools(request.tools)
    if request.HasField("tool_choice"):
        fields["tool_choice"] = _tool_choice(request.tool_choice)
    fields |= _given(request, ("parallel_tool_calls",))
    return fields | _reasoning(request.reasoning)


def completion_fields(request: pb.CompleteRequest) -> Fields:
    """The equivalent body of the HTTP API. Raises BadRequest."""
    fields = _common(request)
    prompts = [_prompt(prompt) for prompt in request.prompts]
    # Pass a single prompt without a list, so that errors name the field without an index.
    fields["prompt"] = prompts[0] if len(prompts) == 1 else prompts
    sampling = request.sampling
    if sampling.logprobs:
        fields["logprobs"] = sampling.top_logprobs
    elif sampling.top_logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs'; set both or none", param="top_logprobs")
    return fields | _given(request, ("echo",))


def tokenize_fields(request: pb.TokenizeRequest) -> Fields:
    """The body of a chat or a completion with that prompt. Raises BadRequest."""
    fields: Fields = {"model": request.model}
    match request.WhichOneof("input"):
        case "text":
            fields["prompt"] = request.text
            # Omit the field if it requests the default.
            return fields | ({} if _special(request) else {"add_special_tokens": False})
        case "chat":
            chat = request.chat
            fields["messages"] = _messages(chat.messages)
            return fields | _tools(chat.tools) | _reasoning(chat.reasoning)
        case _:
            _unset("input", "text or chat")


def _special(request: pb.TokenizeRequest) -> bool:
    return request.add_special_tokens or not request.HasField("add_special_tokens")


def _messages(messages: Iterable[pb.Message]) -> list[Fields]:
    return [_message(message, f"messages.{index}") for index, message in enumerate(messages)]


def _tools(tools: Sequence[pb.Tool]) -> Fields:
    return {"tools": [_tool(tool) for tool in tools]} if tools else {}


def _common(request: pb.ChatRequest | pb.CompleteRequest) -> Fields:
    fields: Fields = {"model": request.model} | _sampling(request.sampling)
    if request.HasField("structure"):
        fields |= _structure(request.structure)
    return fields | _options(request.options)


def _sampling(sampling: pb.Sampling) -> Fields:
    fields = _given(sampling, _PLAIN)
    fields |= {name: list(values) for name in _LISTS if (values := getattr(sampling, name))}
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return fields


def _structure(structure: pb.Structure) -> Fields:
    kind = structure.WhichOneof("structure")
    match kind:
        case None:
            _unset("structure", "json_object, json_schema, regex, lark or choices")
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = parse_object(structure.json_schema, "'json_schema'", "response_format")
            form = {"name": "output", "schema": schema}
            return {"response_format": {"type": "json_schema", "json_schema": form}}
        case "choices":
            return {"structured_outputs": {"choice": list(structure.choices.texts)}}
    return {"structured_outputs": {_STRUCTURES[kind]: getattr(structure, kind)}}


def _options(options: pb.Options) -> Fields:
    names = ("request_id", "user", "cache_salt")
    fields: Fields = {name: text for name in names if (text := getattr(options, name))}
    fields |= _given(options, ("priority",))
    if options.service_class:
        fields["slo_class"] = _CLASSES.get(options.service_class, options.service_class)
    if options.HasField("service_level"):
        fields["slo"] = _given(options.service_level, ("ttft_ms", "tpot_ms"))
    return fields


def _message(message: pb.Message, where: str) -> Fields:
    # Keep the number of an unknown role: the field's check then refuses it.
    fields: Fields = {"role": _ROLES.get(message.role, message.role)} if message.role else {}
    match message.WhichOneof("content"):
        case "text":
            fields["content"] = message.text
        case "parts":
            fields["content"] = [_part(part, where) for part in message.parts.parts]
        case _:
            fields["content"] = None
    if message.reasoning:
        fields["reasoning"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _part(part: pb.ContentPart, where: str) -> Fields:
    if part.WhichOneof("part") is None:
        _unset(f"{where}.content", "text")
    return {"type": "text", "text": part.text}


def _prompt(prompt: pb.Prompt) -> str | list[int]:
    match prompt.WhichOneof("prompt"):
        case "text":
            return prompt.text
        case "token_ids":
            return list(prompt.token_ids.ids)
        case _:
            _unset("prompt", "text or token_ids")


def _tool(tool: pb.Tool) -> Fields:
    function: Fields = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = parse_object(tool.parameters, "'parameters' of a tool", "tools")
    return {"type": "function", "function": function | _given(tool, ("strict",))}


def _tool_choice(choice: pb.ToolChoice) -> Any:
    match choice.WhichOneof("choice"):
        case "name":
            return {"type": "function", "function": {"name": choice.name}}
        case "mode":
            if choice.mode not in _MODES:
                raise BadRequest(
                    f"'tool_choice' has an unknown mode {choice.mode}; use auto, none or required",
                    param="tool_choice",
                )
            return _MODES[choice.mode]
        case _:
            _unset("tool_choice", "mode or name")


def _reasoning(reasoning: pb.Reasoning) -> Fields:
    fields: Fields = {}
    if reasoning.HasField("chat_template_kwargs"):
        text = reasoning.chat_template_kwargs
        name = "chat_template_kwargs"
        fields[name] = parse_object(text, f"'{name}'", name)
    if reasoning.HasField("enable_thinking"):
        kwargs = fields.get("chat_template_kwargs", {})
        fields["chat_template_kwargs"] = kwargs | {"enable_thinking": reasoning.enable_thinking}
    if reasoning.HasField("effort"):
        fields["reasoning_effort"] = reasoning.effort
    return fields


def _given(message: Message, names: Iterable[str]) -> Fields:
    """The optional fields that are set."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _unset(param: str, forms: str) -> NoReturn:
    raise BadRequest(f"'{param}' is empty; set {forms}", param=param)


def finish_reason(reason: str | None) -> "pb.FinishReason.ValueType":
    """Convert a finish reason; None (still running): unspecified."""
    return _FINISH_REASONS[reason] if reason is not None else pb.FINISH_REASON_UNSPECIFIED


def assistant_message(output: AnswerAccumulator) -> pb.Message:
    """The assistant's message. Without content, `text` is unset if there are tool calls."""
    message, calls = pb.Message(role=pb.ROLE_ASSISTANT, reasoning=output.reasoning), output.calls
    if output.content or not calls:
        message.text = output.content
    for call in calls:
        message.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    return message


def delta_fields(delta: Delta) -> dict[str, Any]:
    """The fields of a streamed message; completions have text only."""
    fields: dict[str, Any] = {"text": delta.content}
    if delta.reasoning:
        fields["reasoning"] = delta.reasoning
    calls = [call for call in delta.tool_calls if call.id or call.arguments]
    if calls:
        fields["tool_calls"] = [
            pb.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)
            for call in calls
        ]
    return fields


def stop_reason(reason: int | str | None) -> pb.StopReason | None:
    """The stop string or stop token that ended the output."""
    if reason is None:
        return None
    if isinstance(reason, str):
        return pb.StopReason(text=reason)
    return pb.StopReason(token_id=reason)


def logprobs(tokens: Iterable[TokenWithLogprobs], texts: TokenTexts) -> list[pb.TokenLogprob]:
    """Log probabilities of tokens. The first token of a prompt has none and is skipped."""
    return [
        _logprob(token.token_id, token.logprobs, texts)
        for token in tokens
        if token.logprobs is not None
    ]


def _logprob(token_id: int, entry: TokenLogprobs, texts: TokenTexts) -> pb.TokenLogprob:
    data = texts.data(token_id)
    return pb.TokenLogprob(
        token_id=token_id,
        token=data.decode(errors="replace"),
        bytes=data,
        logprob=finite(entry.logprob),
        rank=entry.rank,
        top=[_top(other, logprob, texts) for other, logprob in entry.top],
    )


def _top(token_id: int, logprob: float, texts: TokenTexts) -> pb.TopLogprob:
    data = texts.data(token_id)
    return pb.TopLogprob(
        token_id=token_id, token=data.decode(errors="replace"), bytes=data, logprob=finite(logprob)
    )
