"""What a request is, in the words that every service shares."""

from dataclasses import dataclass
from enum import StrEnum

from services.core.service import NO_PROMISE, Service

STOP_TOKEN_IDS_MAX = 256
"""Most stop tokens that a client may name."""
EOS_IDS_MAX = 64
"""Most end-of-sequence tokens that a model may have; they come on top of the client's."""
LOGIT_BIAS_MAX = 1024
"""Most tokens whose logits a client may change."""
BIAS_MAX = 100
"""Furthest that a client may move one, either way."""
BAD_WORDS_MAX = 128
"""Most sequences that a client may forbid."""
BAD_WORD_TOKENS_MAX = 4096
"""Most tokens of all of them together."""
GRAMMAR_BYTES_MAX = 64 * 2**10
"""Longest grammar, in UTF-8."""
TOP_LOGPROBS_MAX = 20
"""Most tokens whose log probabilities are told beside a token's own."""
PROMPT_LOGPROBS_MAX = 2**17
"""Most log probabilities of prompts: their tokens times one more than are told beside each."""
CACHE_SALT_CHARS_MAX = 128
"""Longest salt of cached prompts."""


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(StrEnum):
    """In which form a grammar is given; each in the dialect of llguidance."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the whole output must match; after that only a stop token may follow."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off; filters
    see the probabilities after the temperature. Penalties: `repetition_penalty` divides positive
    and multiplies negative logits of tokens in prompt or output (CTRL §4.1), then
    `frequency_penalty` times the count in the output and `presence_penalty` are subtracted (the
    formula of OpenAI), then `logit_bias` (token id, bias) is added. `bad_words` may not be
    completed, whether they begin in the prompt or in the output; of `allowed_token_ids`, if not
    empty, only these are chosen; `grammar` bounds the whole output.

    Token `i` of a request depends on (`seed`, `i`), the logits, the prompt and the output so far
    alone, so neither the batch that it runs in nor a preemption changes it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None

    @property
    def reads_prompt(self) -> bool:
        """Whether tokens of the prompt change what is chosen, beside through the logits."""
        if not self.bad_words:
            return self.repetition_penalty != 1
        return self.repetition_penalty != 1 or any(len(word) > 1 for word in self.bad_words)

    @property
    def reads_output(self) -> bool:
        """Whether earlier tokens of the output do."""
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or self.grammar is not None or self.reads_prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """When a request ends.

    `stop_token_ids` end it with `FinishReason.STOP` and are not part of the visible output;
    before `min_tokens` outputs they are never chosen. `max_tokens` counts output tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which log probabilities to report, of the raw logits before penalties and temperature.

    `output`: how many of the most likely tokens beside each output token, None for nothing about
    the output; `prompt`: the same about each prompt token but the first.
    """

    output: int | None = None
    prompt: int | None = None

    @property
    def runs_prompt(self) -> bool:
        """Whether the whole prompt must run, whatever is cached of it: that yields them."""
        return self.prompt is not None


NO_LOGPROBS = LogprobOptions()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was: natural logarithm, rank from 1, and the best (id, logprob) first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A generation request as the worker's planner sees it.

    `waited_s` is the time since it came to the gateway; `choice` which of several choices of one
    client request it is. `returnable`: a worker that cannot start it soon gives it back.
    `resumable`: its gateway goes on with it elsewhere if a worker gives it back after tokens.
    Requests share cached prompts only with those of the same `cache_salt`. One that another worker
    has begun has `output_ids` already: its next token has index `len(output_ids)`, and `limits`
    count them.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    arrival_s: float
    logprobs: LogprobOptions = NO_LOGPROBS
    service: Service = NO_PROMISE
    waited_s: float = 0.0
    traceparent: str = ""
    cache_salt: str = ""
    choice: int = 0
    returnable: bool = False
    resumable: bool = False
    output_ids: tuple[int, ...] = ()


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks of `block_size` slots that `tokens` tokens occupy."""
    return -(-tokens // block_size)


def admission_blocks(tokens: int, tokens_max: int, block_size: int) -> int:
    """Free blocks that a sequence of `tokens` tokens needs before it may run.

    Room for what it has plus one block: output grows optimistically. A sequence that will never
    exceed `tokens_max` tokens needs no more than those occupy, so that one which fits alone is
    always admitted in the end.
    """
    return min(blocks_for(tokens, block_size) + 1, blocks_for(tokens_max, block_size))
