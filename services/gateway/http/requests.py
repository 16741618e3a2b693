"""The bodies of the OpenAI API that are served: strict types, checked ranges."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from services.core.request import STOP_TOKEN_IDS_MAX
from services.gateway.errors import InvalidRequest, Unsupported
from services.gateway.http.parameters import known_fields

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
STOP_STRINGS_MAX = 4
STOP_CHARS_MAX = 256
PROMPTS_MAX = 64

Prompt = str | tuple[int, ...]


def _refuse(message: str) -> PydanticCustomError:
    return PydanticCustomError("refused", "{why}", {"why": message})


def _is_text(value: Any) -> bool:
    """Whether it is a string that has a UTF-8 form; JSON escapes can make others."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_stop(value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if value is None:
        return ()
    if not isinstance(strings, list) or len(strings) > STOP_STRINGS_MAX:
        raise _refuse(f"must be a string or a list of up to {STOP_STRINGS_MAX} strings")
    if not all(_is_text(text) and 1 <= len(text) <= STOP_CHARS_MAX for text in strings):
        raise _refuse(f"must hold strings of 1 to {STOP_CHARS_MAX} characters")
    return tuple(strings)


def _parse_prompts(value: Any) -> tuple[Prompt, ...]:
    """One prompt, or several that become choices."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if not isinstance(value, list) or not value:
        raise _refuse("must be a nonempty string, list of token ids, or list of these")
    if isinstance(value[0], int):
        return (_token_prompt(value),)
    if len(value) > PROMPTS_MAX:
        raise _refuse(f"must hold at most {PROMPTS_MAX} prompts")
    return tuple(
        _token_prompt(item) if isinstance(item, list) else _text_prompt(item) for item in value
    )


def _text_prompt(value: Any) -> str:
    if not _is_text(value) or not value or "\0" in value:
        raise _refuse("must hold nonempty strings of valid Unicode without NUL")
    return str(value)


def _token_prompt(value: Sequence[Any]) -> tuple[int, ...]:
    if not value or not all(type(item) is int and 0 <= item <= INT32_MAX for item in value):
        raise _refuse("must hold token ids: nonempty lists of integers from 0")
    return tuple(value)


def _parse_content(value: Any) -> str:
    """Plain text, or the text parts joined."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, list) or not parts:
        raise _refuse("must be a string or a nonempty list of text parts")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind in ("image_url", "input_audio", "file", "refusal"):
            raise Unsupported(
                f"message parts of type '{kind}' are not supported yet; send text",
                param="messages",
            )
        if kind != "text" or set(part) != {"type", "text"}:
            raise _refuse("must hold parts of the form {'type': 'text', 'text': …}")
        if not _is_text(part["text"]) or "\0" in part["text"]:
            raise _refuse("must hold valid Unicode without NUL")
        texts.append(part["text"])
    return "".join(texts)


Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_parse_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                {
                    "type": "array",
                    "maxItems": STOP_STRINGS_MAX,
                    "items": {"type": "string", "minLength": 1, "maxLength": STOP_CHARS_MAX},
                },
                {"type": "null"},
            ]
        }
    ),
]
_TOKENS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_parse_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                _TOKENS_SCHEMA,
                {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": PROMPTS_MAX,
                    "items": {"type": "string", "minLength": 1},
                },
                {"type": "array", "minItems": 1, "maxItems": PROMPTS_MAX, "items": _TOKENS_SCHEMA},
            ]
        }
    ),
]
Content = Annotated[
    str,
    PlainValidator(_parse_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(_Strict):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stop: Stop = ()
    stop_token_ids: (
        Annotated[
            list[Annotated[int, Field(ge=0, le=INT32_MAX)]],
            Field(max_length=STOP_TOKEN_IDS_MAX, fail_fast=True),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "'stream_options' needs 'stream': true; leave one or the other",
                param="stream_options",
            )
        limit = self.output_limit()
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise InvalidRequest(
                f"'min_tokens' {self.min_tokens} is above 'max_tokens' {limit}; lower it",
                param="min_tokens",
            )
        return self

    def output_limit(self) -> int | None:
        """Most output tokens that the client wants; None for what the context allows."""
        return self.max_tokens


class Message(_Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatRequest(Generation):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise InvalidRequest(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them",
                param="max_tokens",
            )
        return self

    def output_limit(self) -> int | None:
        """See Generation."""
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    def template_messages(self) -> list[dict[str, str]]:
        """The messages as chat templates know them: "developer" is what "system" used to be."""
        return [
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content,
            }
            for message in self.messages
        ]


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    prompt: Prompts


R = TypeVar("R", bound=Generation)

# Fields of messages that mean nothing here; clients send back what they were given.
_MESSAGE_HARMLESS = ("name",)
_MESSAGE_UNSUPPORTED = ("annotations", "audio", "function_call", "refusal", "tool_calls")


def parse_chat(data: Mapping[str, Any]) -> ChatRequest:
    """A chat request; raises InvalidRequest."""
    fields = known_fields(data, ChatRequest.model_fields)
    if isinstance(messages := fields.get("messages"), list):
        fields["messages"] = [_plain_message(message) for message in messages]
    return _validated(ChatRequest, fields)


def parse_completion(data: Mapping[str, Any]) -> CompletionRequest:
    """A completion request; raises InvalidRequest."""
    return _validated(CompletionRequest, known_fields(data, CompletionRequest.model_fields))


def _plain_message(message: Any) -> Any:
    """The message without fields that ask for nothing."""
    if not isinstance(message, dict):
        return message
    kept = {}
    for name, value in message.items():
        if name in _MESSAGE_UNSUPPORTED:
            if value not in (None, [], ""):
                raise Unsupported(
                    f"'{name}' in a message is not supported yet; leave it out", param="messages"
                )
        elif name not in _MESSAGE_HARMLESS:
            kept[name] = value
    if kept.get("role") in ("tool", "function"):
        raise Unsupported(
            f"messages of role '{kept['role']}' are not supported yet; leave them out",
            param="messages",
        )
    return kept


def _validated(kind: type[R], fields: Mapping[str, Any]) -> R:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part)[:64] for part in first["loc"])
        shown = where.encode("ascii", "backslashreplace").decode() or None
        message = f"'{shown}': {first['msg'][0].lower()}{first['msg'][1:]}"
        raise InvalidRequest(message, param=shown) from None
