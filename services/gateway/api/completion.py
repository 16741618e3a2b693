"""The body of /v1/completions."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from services.gateway.api.generation import (
    CHOICES_MAX,
    GenerationRequest,
    Tokens,
    Top,
    validated_generation,
)
from services.gateway.api.parameters import COMPLETION, UnknownFields, known_fields
from services.gateway.api.prompts import Prompts
from services.gateway.vocabulary.errors import BadRequest

COMPLETION_TOKENS = 16
"""Default of max_tokens."""


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompts = Field(description="Text, token ids, or a list of these.")
    max_tokens: Tokens | None = Field(
        None,
        description=f"Maximum output tokens. Default: {COMPLETION_TOKENS}. 0 needs echo.",
    )
    logprobs: Top | None = Field(
        None,
        description="Return log probabilities (raw logits), with this number of most likely tokens"
        " per token.",
    )
    echo: bool | None = Field(
        None, description="The text and the log probabilities start with the prompt."
    )

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest(
                "'max_tokens' 0 needs 'echo': true; send 'echo', or at least 1", param="max_tokens"
            )
        # Each choice is scheduled separately, so bound the choices per request.
        if self.all_choices > CHOICES_MAX:
            raise BadRequest(
                f"'n' {self.choices} with {len(self.prompt)} prompts exceeds {CHOICES_MAX} choices;"
                " send several requests",
                param="n",
            )
        return self

    @property
    def all_choices(self) -> int:
        return len(self.prompt) * self.choices

    @property
    def output_logprobs(self) -> int | None:
        return self.logprobs


def parse_completion(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> CompletionRequest:
    """Parse a completion request; see `parse_chat`."""
    return completion_of(data, UnknownFields(refuse_unknown))


def completion_of(data: Mapping[str, Any], unknown: UnknownFields) -> CompletionRequest:
    """Like `parse_completion`, but collects unknown fields in `unknown`."""
    fields = known_fields(data, CompletionRequest.model_fields, COMPLETION, unknown)
    return validated_generation(CompletionRequest, fields, unknown)
