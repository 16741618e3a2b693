"""What every request for text has: strict types, checked ranges, the names of OpenAI."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, model_validator

from services.core.request import (
    CACHE_SALT_CHARS_MAX,
    PROMPT_LOGPROBS_MAX,
    STOP_TOKEN_IDS_MAX,
    TOP_LOGPROBS_MAX,
)
from services.gateway.api.fields import (
    INT32_MAX,
    INT64_MAX,
    REQUEST_ID_PATTERN,
    BadWords,
    LogitBias,
    Stop,
    TokenId,
)
from services.gateway.api.parameters import UnknownFields
from services.gateway.api.structures import (
    GuidedChoice,
    GuidedGrammar,
    GuidedJson,
    GuidedRegex,
    ResponseFormat,
    StructuredOutputs,
)
from services.gateway.api.validation import Strict, validated
from services.gateway.structure.asked import Structure
from services.gateway.vocabulary.class_targets import TARGET_MS_MAX
from services.gateway.vocabulary.errors import BadRequest, NotSupported

N_MAX = 16
"""Most choices of one prompt."""
CHOICES_MAX = 128
"""Most choices of one request, of all its prompts together."""
CHOICE_IDS_MAX = 2**20
"""Most token ids that the choices of one request name together; each goes to a worker by itself."""
NO_EFFECT = "x-no-effect"
"""Marks fields in the schema that are checked and change nothing."""
TEMPERATURE_MAX = 2.0
REPETITION_PENALTY_MAX = 2.0

Tokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
Top = Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Milliseconds = Annotated[float, Field(ge=1, le=TARGET_MS_MAX)]


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool | None = Field(None, description="Token counts in a last event.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: token counts of its choice so far in every event."
    )
    include_obfuscation: bool | None = Field(
        None, description="Nothing is padded.", json_schema_extra={NO_EFFECT: True}
    )


class Slo(Strict):
    """Targets of a request."""

    ttft_ms: Milliseconds | None = Field(None, description="Time to the first token.")
    tpot_ms: Milliseconds | None = Field(None, description="Time between tokens.")


class GenerationRequest(Strict):
    """What both endpoints take. Fields that are null are as if they were left out."""

    model: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="The served model's name or an alias."
    )
    n: Annotated[int, Field(ge=1, le=N_MAX)] | None = Field(
        None,
        description=f"Choices of each prompt; of all prompts together at most {CHOICES_MAX}. With"
        " a seed the first choice has it, the others have seeds that follow from it. All"
        f" choices together name at most {CHOICE_IDS_MAX:,} tokens, each those of its prompt and of"
        " logit_bias, bad_words and allowed_token_ids.",
    )
    best_of: int | None = Field(None, description="Only if it equals n.")
    stream: bool | None = Field(None, description="Server-sent events instead of one object.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")
    max_tokens: Tokens | None = Field(None, description="Most output tokens.")
    min_tokens: Tokens | None = Field(None, description="Nothing stops the output before.")
    ignore_eos: bool | None = Field(None, description="The model's own end does not end it.")
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = Field(
        None, description="0 is greedy; left out: the model's generation_config.json, else 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Left out: the model's generation_config.json, else 1."
    )
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None,
        description="0 and -1 switch it off; at most the vocabulary. Left out: the model's"
        " generation_config.json, else off.",
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Left out: the model's generation_config.json, else 0."
    )
    presence_penalty: Penalty | None = Field(None, description="OpenAI's formula.")
    frequency_penalty: Penalty | None = Field(None, description="OpenAI's formula.")
    repetition_penalty: Annotated[float, Field(gt=0, le=REPETITION_PENALTY_MAX)] | None = Field(
        None,
        description="Counts prompt and output. Left out: the model's generation_config.json,"
        " else 1.",
    )
    logit_bias: LogitBias = Field((), description="Token ids below the vocabulary's size.")
    bad_words: BadWords = Field(
        (), description="Never in the output, with or without a blank before them."
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Only these are chosen."
    )
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = Field(
        None, description="The same seed and model give the same output in float32 on CPU."
    )
    stop: Stop = Field((), description="Ends the output before it.")
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=STOP_TOKEN_IDS_MAX, fail_fast=True)] | None
    ) = Field(None, description="Each ends the output.")
    include_stop_str_in_output: bool | None = Field(
        None, description="The output ends with what stopped it."
    )
    skip_special_tokens: bool | None = Field(
        None, description="false shows special tokens in the text."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds its own to a text; left out: for prompts yes, for"
        " chats no, whose template has them.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None,
        description="A longer prompt is cut to so many tokens, -1: to what fits. The text may have"
        " four times the tokens of the context.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Where it is cut; left by default."
    )
    prompt_logprobs: Top | None = Field(
        None,
        description="Of each prompt token, with so many of the most likely; not in streams. Of all"
        f" choices together at most {PROMPT_LOGPROBS_MAX:,} numbers.",
    )
    return_token_ids: bool | None = Field(None, description="Adds prompt_token_ids and token_ids.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Tokens of log probabilities look like token_id:42."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARS_MAX)] | None = Field(
        None,
        description="Cached prefixes are shared only among requests with the same one.",
    )
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = Field(
        None,
        description="Good once in 10 minutes. Name of the request in logs and x-request-id, unless"
        " that header comes in.",
    )
    service_tier: Literal["auto", "default", "scale", "flex", "priority"] | None = Field(
        None,
        description="priority: class interactive, flex: batch, default and scale: standard;"
        " auto names none. The answer tells the tier that was used.",
    )
    priority: Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)] | None = Field(
        None,
        description="Below 0: class interactive, above 0: batch; within a class, smaller is"
        " earlier.",
    )
    slo_class: Literal["interactive", "standard", "batch"] | None = Field(
        None, description="The class by name; see service-classes.md."
    )
    slo: Slo | None = Field(
        None, description="Targets in milliseconds, which override those of the class."
    )

    response_format: ResponseFormat = Field(
        None,
        description="json_schema or json_object: the output follows it, text: it is free;"
        " structural_tag is refused; see agents.md.",
    )
    structured_outputs: StructuredOutputs = Field(
        None, description="One of json, regex, choice, grammar (Lark or EBNF) and json_object."
    )
    guided_json: GuidedJson = Field(None, description="Older name of structured_outputs.json.")
    guided_regex: GuidedRegex = Field(None, description="Older name of structured_outputs.regex.")
    guided_choice: GuidedChoice = Field(
        None, description="Older name of structured_outputs.choice."
    )
    guided_grammar: GuidedGrammar = Field(
        None, description="Older name of structured_outputs.grammar."
    )

    _warnings: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise BadRequest(
                "'stream_options' needs 'stream': true; leave one or the other",
                param="stream_options",
            )
        if self.best_of is not None and self.best_of != self.choices:
            raise NotSupported(
                f"'best_of' {self.best_of} differs from 'n' {self.choices}; leave it out",
                param="best_of",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "'prompt_logprobs' are not told in a stream; leave one or the other",
                param="prompt_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            raise BadRequest(
                "'truncate_prompt_tokens' 0 leaves no prompt; give the tokens to keep, or -1",
                param="truncate_prompt_tokens",
            )
        if len(self._structures()) > 1:
            names = " and ".join(f"'{one.param}'" for one in self._structures())
            raise BadRequest(
                f"{names} ask for a form each; send one of them", param=self._structures()[1].param
            )
        limit = self.output_limit()
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise BadRequest(
                f"'min_tokens' {self.min_tokens} is above 'max_tokens' {limit}; lower it",
                param="min_tokens",
            )
        return self

    def output_limit(self) -> int | None:
        """Most output tokens that the client wants; None if it does not say."""
        return self.max_tokens

    def _structures(self) -> list[Structure]:
        asked = (
            *(self.response_format, self.structured_outputs, self.guided_json),
            *(self.guided_regex, self.guided_choice, self.guided_grammar),
        )
        return [one for one in asked if one is not None]

    @property
    def structure(self) -> Structure | None:
        """The required form of the output, or of the answer in it."""
        return next(iter(self._structures()), None)

    @property
    def choices(self) -> int:
        """Choices of each prompt."""
        return 1 if self.n is None else self.n

    @property
    def output_logprobs(self) -> int | None:
        """How many alternatives are told beside each output token; None: no log probabilities."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream has token counts."""
        options = self.stream_options
        return options is not None and bool(
            options.include_usage and options.continuous_usage_stats
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the client should know of fields that were ignored; ASCII sentences."""
        return self._warnings


R = TypeVar("R", bound=GenerationRequest)


def validated_generation(kind: type[R], fields: dict[str, Any], unknown: UnknownFields) -> R:
    """A request with the warnings of `unknown`; raises BadRequest if a field is wrong."""
    if isinstance(options := fields.get("stream_options"), dict):
        known = StreamOptions.model_fields
        fields["stream_options"] = unknown.keep_known(options, known, "stream_options")
    body = validated(kind, fields)
    body._warnings = unknown.warnings
    return body
