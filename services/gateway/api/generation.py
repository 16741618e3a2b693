"""The body fields that chats and completions share, with OpenAI's and vLLM's names."""

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, PrivateAttr, model_validator

from services.core.request import (
    CACHE_SALT_CHARS_MAX,
    PROMPT_LOGPROBS_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    STOP_TOKEN_IDS_MAX,
    TOP_LOGPROBS_MAX,
)
from services.gateway.api.fields import (
    INT32_MAX,
    INT64_MAX,
    REQUEST_ID_PATTERN,
    BadWords,
    LogitBias,
    SessionKey,
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
from services.gateway.structure.structured_outputs import Structure
from services.gateway.vocabulary.class_targets import TARGET_MS_MAX
from services.gateway.vocabulary.errors import BadRequest, NotSupported

CHOICES_MAX = 128
"""Maximum choices per request, over all its prompts."""
OUTPUT_TOKENS_MAX = 2**20
"""Maximum output tokens of several choices together, unless they stream: the gateway keeps them."""
CHOICE_IDS_MAX = 2**20
"""Maximum token ids of all choices of a request; each choice is sent to a worker separately."""
NO_EFFECT = "x-no-effect"
"""Schema mark of fields that are checked but have no effect."""
TEMPERATURE_MAX = 2.0

Tokens = Annotated[int, Field(ge=0, le=INT32_MAX)]
Top = Annotated[int, Field(ge=0, le=TOP_LOGPROBS_MAX)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Milliseconds = Annotated[float, Field(ge=1, le=TARGET_MS_MAX)]


class StreamOptions(Strict):
    """Options of a streamed response."""

    include_usage: bool | None = Field(None, description="Send token counts in a last event.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: token counts of the choice so far in every event."
    )
    include_obfuscation: bool | None = Field(
        None, description="No effect: events are not padded.", json_schema_extra={NO_EFFECT: True}
    )


class Slo(Strict):
    """Latency targets of a request."""

    ttft_ms: Milliseconds | None = Field(None, description="Time to first token.")
    tpot_ms: Milliseconds | None = Field(None, description="Time per output token.")


class GenerationRequest(Strict):
    """The fields that chats and completions share. null means the default."""

    model: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        description="The served model's name or an alias."
    )
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] | None = Field(
        None,
        description=f"Choices per prompt; at most {CHOICES_MAX} over all prompts. The first choice"
        " uses the seed, the others use seeds derived from it. All choices together may have"
        f" {CHOICE_IDS_MAX:,} tokens: for each choice those of its prompt, logit_bias, bad_words"
        f" and allowed_token_ids. Unless they stream, they may have {OUTPUT_TOKENS_MAX:,} output"
        " tokens.",
    )
    best_of: int | None = Field(None, description="Must equal n.")
    stream: bool | None = Field(
        None, description="Send server-sent events instead of a single object."
    )
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")
    max_tokens: Tokens | None = Field(None, description="Maximum output tokens.")
    min_tokens: Tokens | None = Field(
        None, description="Minimum output tokens: no stop condition applies before."
    )
    ignore_eos: bool | None = Field(
        None, description="Continue after the model's end-of-sequence token."
    )
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] | None = Field(
        None, description="0 is greedy. Default: the model's generation_config.json, else 1."
    )
    top_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Default: the model's generation_config.json, else 1."
    )
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None,
        description="0 and -1 disable it; at most the vocabulary size. Default: the model's"
        " generation_config.json, else disabled.",
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Default: the model's generation_config.json, else 0."
    )
    presence_penalty: Penalty | None = Field(None, description="OpenAI's formula.")
    frequency_penalty: Penalty | None = Field(None, description="OpenAI's formula.")
    repetition_penalty: (
        Annotated[float, Field(ge=REPETITION_PENALTY_MIN, le=REPETITION_PENALTY_MAX)] | None
    ) = Field(
        None,
        description="Applies to prompt and output. Default: the model's generation_config.json,"
        " else 1.",
    )
    logit_bias: LogitBias = Field(
        (), description="Biases by token id; ids below the vocabulary size."
    )
    bad_words: BadWords = Field(
        (),
        description="Words whose tokens never appear in this order in the output; each word is"
        " tokenised with and without a space before it, as in vLLM. Other tokens may spell a word,"
        " and longer tokens may contain it.",
    )
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="Only these tokens are sampled."
    )
    seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = Field(
        None,
        description="The same seed and model give the same output in float64 on CPU; other"
        " dtypes round differently beside other requests.",
    )
    stop: Stop = Field(
        (),
        description="Strings that end the answer; not part of it, and not searched in the"
        " reasoning.",
    )
    stop_token_ids: (
        Annotated[list[TokenId], Field(max_length=STOP_TOKEN_IDS_MAX, fail_fast=True)] | None
    ) = Field(None, description="Tokens that end the output.")
    include_stop_str_in_output: bool | None = Field(
        None, description="The output includes the stop string or token."
    )
    skip_special_tokens: bool | None = Field(
        None, description="false includes special tokens in the text."
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens. Default: true for prompts, false"
        " for chats, whose template has them.",
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None,
        description="Truncate the prompt to this number of tokens, -1: to what fits. The text may"
        " have at most four times the tokens of the context.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side that is truncated. Default: left."
    )
    prompt_logprobs: Top | None = Field(
        None,
        description="Return log probabilities of the prompt tokens, with this number of most likely"
        f" tokens; not in streams. At most {PROMPT_LOGPROBS_MAX:,} numbers over all choices.",
    )
    return_token_ids: bool | None = Field(
        None, description="Return prompt_token_ids and token_ids."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Log probabilities show tokens in the form token_id:42."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=CACHE_SALT_CHARS_MAX)] | None = Field(
        None,
        description="Only requests with the same salt share cached prefixes.",
    )
    prompt_cache_key: SessionKey = Field(
        None,
        description="Requests with the same key prefer the same group of workers, among groups that"
        " are equal otherwise. Prefixes are cached without it; `cache_salt` separates them.",
    )
    session_id: SessionKey = Field(None, description="The same as prompt_cache_key.")
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = Field(
        None,
        description="Id of the request in logs and x-request-id, unless the request has that"
        " header. Must be unique within 10 minutes.",
    )
    service_tier: Literal["auto", "default", "scale", "flex", "priority"] | None = Field(
        None,
        description="priority: class interactive, flex: batch, default and scale: standard;"
        " auto: the default class. The response reports the tier used.",
    )
    priority: Annotated[int, Field(ge=-INT32_MAX - 1, le=INT32_MAX)] | None = Field(
        None,
        description="Below 0: class interactive, above 0: batch. Lower values are served"
        " earlier within a class with the scheduling policy priority, and within batch with slo.",
    )
    slo_class: Literal["interactive", "standard", "batch"] | None = Field(
        None, description="The service class; see service-classes.md."
    )
    slo: Slo | None = Field(
        None, description="Latency targets in milliseconds; they override those of the class."
    )

    response_format: ResponseFormat = Field(
        None,
        description="json_schema or json_object: the output conforms to it, except for parts that a"
        " `Warning` header names; text: unconstrained; structural_tag is refused. See agents.md.",
    )
    structured_outputs: StructuredOutputs = Field(
        None, description="Exactly one of json, regex, choice, grammar (Lark or EBNF), json_object."
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
                "'stream_options' needs 'stream': true; omit it, or set 'stream'",
                param="stream_options",
            )
        if self.best_of is not None and self.best_of != self.choices:
            raise NotSupported(
                f"'best_of' {self.best_of} differs from 'n' {self.choices}; omit it",
                param="best_of",
            )
        # vLLM refuses the combination, too.
        if self.stream and self.prompt_logprobs is not None:
            raise BadRequest(
                "'prompt_logprobs' is not supported in a stream; omit it, or do not stream",
                param="prompt_logprobs",
            )
        if self.truncate_prompt_tokens == 0:
            raise BadRequest(
                "'truncate_prompt_tokens' 0 leaves no prompt; send the tokens to keep, or -1",
                param="truncate_prompt_tokens",
            )
        # Old and new names of the same option count as a conflict as well.
        if len(self._structures()) > 1:
            names = " and ".join(f"'{structure.param}'" for structure in self._structures())
            raise BadRequest(f"{names} conflict; send only one", param=self._structures()[1].param)
        limit = self.output_limit()
        if limit is not None and self.min_tokens is not None and self.min_tokens > limit:
            raise BadRequest(
                f"'min_tokens' {self.min_tokens} exceeds 'max_tokens' {limit}; lower it",
                param="min_tokens",
            )
        return self

    def output_limit(self) -> int | None:
        """The client's limit of output tokens; None without a limit."""
        return self.max_tokens

    def _structures(self) -> list[Structure]:
        structures = (
            *(self.response_format, self.structured_outputs, self.guided_json),
            *(self.guided_regex, self.guided_choice, self.guided_grammar),
        )
        return [structure for structure in structures if structure is not None]

    @property
    def structure(self) -> Structure | None:
        """The required structure of the output; with reasoning, of the answer after it."""
        return next(iter(self._structures()), None)

    @property
    def choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def all_choices(self) -> int:
        """Choices over all prompts."""
        return self.choices

    @property
    def output_logprobs(self) -> int | None:
        """Number of alternatives per output token; None: no log probabilities."""
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
        """ASCII sentences about ignored fields, for the client."""
        return self._warnings


R = TypeVar("R", bound=GenerationRequest)


def validated_generation(kind: type[R], fields: dict[str, Any], unknown: UnknownFields) -> R:
    """Validate a request and set its warnings from `unknown`. Raises BadRequest."""
    # Treat unknown fields of nested options like those of the body.
    if isinstance(options := fields.get("stream_options"), dict):
        known = StreamOptions.model_fields
        fields["stream_options"] = unknown.keep_known(options, known, "stream_options")
    body = validated(kind, fields)
    body._warnings = unknown.warnings
    return body
