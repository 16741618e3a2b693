"""Bodies of /tokenize and /detokenize."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from services.gateway.api.chat import parse_chat
from services.gateway.api.completion import parse_completion
from services.gateway.api.fields import TokenId
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.parameters import Policy, UnknownFields, known_fields
from services.gateway.api.validation import validated
from services.gateway.vocabulary.errors import BadRequest

TEXT_TOKENS_MAX = 2**17
"""Maximum tokens of a request to /detokenize."""

# Chat fields that affect the prompt.
_CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "enable_thinking",
    "reasoning_effort",
    "chat_template",
    "chat_template_kwargs",
)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class TokenizeRequest(_Strict):
    """Body of /tokenize: a prompt, or a chat with the fields that affect its prompt."""

    model: Annotated[str, Field(max_length=512)] | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(_Strict):
    """Body of /detokenize."""

    model: Annotated[str, Field(max_length=512)] | None = None
    tokens: Annotated[list[TokenId], Field(max_length=TEXT_TOKENS_MAX, fail_fast=True)]


class ParsedBody(Protocol):
    """A parsed body."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """ASCII sentences about ignored fields."""


@dataclass(frozen=True, slots=True)
class Tokenize:
    """Tokenize the prompt of `body`; `entries`: return the vocabulary entries as well."""

    body: GenerationRequest
    entries: bool
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Detokenize:
    """Convert token ids of `model` to text."""

    model: str
    token_ids: Sequence[int]
    warnings: tuple[str, ...]


def parse_tokenize(
    data: Mapping[str, Any], served: str | None, *, refuse_unknown: bool = False
) -> Tokenize:
    """Parse a body of /tokenize; `served` is the default model, None: the body must name it.

    Raises:
        BadRequest: if a field is invalid.
    """
    unknown = UnknownFields(refuse_unknown)
    names = (*TokenizeRequest.model_fields, *_CHAT_FIELDS)
    fields = known_fields(data, names, Policy(), unknown)
    own = {name: fields[name] for name in fields if name in TokenizeRequest.model_fields}
    request = validated(TokenizeRequest, own)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequest("send either 'prompt' or 'messages', not both", param="prompt")
    shared = {
        "model": _named(request.model, served),
        "add_special_tokens": request.add_special_tokens,
    }
    # Parse as a generation request, so that the prompt is built exactly as for generation.
    if request.prompt is not None:
        body: GenerationRequest = parse_completion(shared | {"prompt": request.prompt})
    else:
        chat = {name: fields[name] for name in fields if name in _CHAT_FIELDS}
        body = parse_chat(shared | chat, refuse_unknown=refuse_unknown)
    return Tokenize(body, bool(request.return_token_strs), unknown.warnings + body.warnings)


def parse_detokenize(
    data: Mapping[str, Any], served: str | None, *, refuse_unknown: bool = False
) -> Detokenize:
    """Parse a body of /detokenize; `served` is the default model, None: the body must name it.

    Raises:
        BadRequest: if a field is invalid.
    """
    unknown = UnknownFields(refuse_unknown)
    fields = known_fields(data, DetokenizeRequest.model_fields, Policy(), unknown)
    request = validated(DetokenizeRequest, fields)
    return Detokenize(_named(request.model, served), request.tokens, unknown.warnings)


def _named(model: str | None, served: str | None) -> str:
    """The model of a body. Raises BadRequest if neither is given."""
    name = model or served
    if name is None:
        raise BadRequest("'model' is missing; name a model of /v1/models", param="model")
    return name
