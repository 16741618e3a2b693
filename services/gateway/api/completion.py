"""Bodies of completions."""

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
"""Output tokens of a completion that does not say how many."""


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    prompt: Prompts = Field(description="Texts or lists of token ids, mixed too.")
    max_tokens: Tokens | None = Field(
        None,
        description=f"Most output tokens; left out: {COMPLETION_TOKENS}. 0 needs echo.",
    )
    logprobs: Top | None = Field(
        None, description="Of the raw logits, with so many of the most likely tokens beside each."
    )
    echo: bool | None = Field(
        None, description="The text begins with the prompt, log probabilities too."
    )

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest(
                "'max_tokens' 0 needs 'echo': true; ask for one token or more", param="max_tokens"
            )
        if len(self.prompt) * self.choices > CHOICES_MAX:
            raise BadRequest(
                f"'n' {self.choices} of {len(self.prompt)} prompts makes more than {CHOICES_MAX}"
                " choices; send several requests",
                param="n",
            )
        return self

    @property
    def output_logprobs(self) -> int | None:
        return self.logprobs


def parse_completion(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> CompletionRequest:
    """A completion request; see `parse_chat`."""
    return completion_of(data, UnknownFields(refuse_unknown))


def completion_of(data: Mapping[str, Any], unknown: UnknownFields) -> CompletionRequest:
    """See `parse_completion` and `chat_of`."""
    fields = known_fields(data, CompletionRequest.model_fields, COMPLETION, unknown)
    return validated_generation(CompletionRequest, fields, unknown)
