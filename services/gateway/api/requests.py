"""What clients may send through any door: strict types, checked ranges, the names of OpenAI."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.core.request import STOP_TOKEN_IDS_MAX
from services.gateway.api.fields import INT32_MAX, INT64_MAX, Content, Prompts, Stop
from services.gateway.api.parameters import known_fields
from services.gateway.errors import InvalidRequest, Unsupported


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Options of a streamed response."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(_Strict):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:=@+/-]{1,128}$")] | None = None
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

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


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
