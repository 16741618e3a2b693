"""A generation request with its sampling parameters and limits; shared by all services."""

from dataclasses import dataclass
from enum import StrEnum

from services.core.adapter import Adapter
from services.core.destination import Destination
from services.core.service import DEFAULT_SERVICE, Service

STOP_TOKEN_IDS_MAX = 256
"""Maximum number of stop tokens per request."""
EOS_IDS_MAX = 64
"""Maximum number of end-of-sequence tokens of a model, in addition to the client's stop tokens."""
LOGIT_BIAS_MAX = 1024
"""Maximum number of entries of `logit_bias`."""
BIAS_MAX = 100
"""Maximum absolute value of a logit bias."""
REPETITION_PENALTY_MIN, REPETITION_PENALTY_MAX = 0.01, 2.0
"""Range of `repetition_penalty`: a logit divided by the minimum stays finite."""
BAD_WORDS_MAX = 128
"""Maximum number of `bad_words`."""
BAD_WORD_TOKENS_MAX = 4096
"""Maximum number of tokens of all `bad_words` together."""
GRAMMAR_BYTES_MAX = 64 * 2**10
"""Maximum size of a grammar in UTF-8."""
TOP_LOGPROBS_MAX = 20
"""Maximum number of alternatives (`top_logprobs`) per token."""
PROMPT_LOGPROBS_MAX = 2**17
"""Maximum number of prompt log probabilities: tokens × (1 + alternatives per token)."""
SERVER_LOSSES_MAX = 3
"""Recent losses of upstream servers under a request after which it fails: it may be their cause."""
CACHE_SALT_CHARS_MAX = 128
"""Maximum length of a `cache_salt`."""
VOCAB_MAX = 2**24
"""Maximum number of rows of a model's output layer."""
CONTEXT_TOKENS_MAX = 2**31 - 1
"""Maximum context length of a model; records have 32-bit integers."""


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class GrammarKind(StrEnum):
    """Formats of grammars; each is parsed by llguidance."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Grammar that the whole output must match; only a stop token may follow a full match."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters that select the next token from the logits.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 disable the filter; filters
    apply after the temperature. Penalties: `repetition_penalty` divides positive
    and multiplies negative logits of tokens in prompt or output (CTRL §4.1), then
    `frequency_penalty` times the count in the output and `presence_penalty` are subtracted (the
    formula of OpenAI), then `logit_bias` (token id, bias) is added. The output never completes a
    sequence of `bad_words`, even if it begins in the prompt; a non-empty `allowed_token_ids`
    restricts the choice to these tokens; `grammar` constrains the whole output.

    Token `i` depends only on (`seed`, `i`), the logits, the prompt and the output so far, so
    neither the composition of a batch nor a preemption changes it.
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
        """Whether the sampler needs the prompt tokens in addition to the logits."""
        if not self.bad_words:
            return self.repetition_penalty != 1
        return self.repetition_penalty != 1 or any(len(word) > 1 for word in self.bad_words)

    @property
    def reads_output(self) -> bool:
        """Whether the sampler needs the earlier output tokens."""
        penalties = self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or self.grammar is not None or self.reads_prompt


@dataclass(frozen=True, slots=True)
class Limits:
    """Conditions that end a request.

    A token of `stop_token_ids` ends it with `FinishReason.STOP` and is not part of the visible
    output; the sampler masks these before `min_tokens` outputs. `max_tokens` counts output tokens.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Log probabilities to report, computed from the raw logits (no penalties, no temperature).

    `output`: number of most likely alternatives per output token; None for no output log
    probabilities. `prompt`: the same for each prompt token except the first.
    """

    output: int | None = None
    prompt: int | None = None

    @property
    def runs_prompt(self) -> bool:
        """Whether cached prefixes cannot be used: the logits of the whole prompt are needed."""
        return self.prompt is not None


NO_LOGPROBS = LogprobOptions()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probability of a token, its rank from 1, and `top` (id, logprob), best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A generation request as a gateway sends it to a worker.

    `request_id` identifies it between gateway, scheduler and worker. Inside an engine a copy
    carries the id of its sequence instead, see `sequence_ids.py`. `waited_s` is the time from its
    arrival at the gateway to `arrival_s`; `choice` is its index among the choices of a client
    request. `returnable`: a worker that cannot start it soon returns it to the scheduler's queue.
    `resumable`: its gateway resumes it on another worker if it is returned after output tokens.
    Requests share cached prefixes only within the same `cache_salt`. A request that another worker
    has started has `output_ids`: its next token has index `len(output_ids)`, and `limits` include
    these tokens. `server_losses`: losses of upstream servers under it at earlier workers. `hand_to`
    is the worker that computes its output, apart from the first token, if the KV can be sent there.
    `adapter`: the LoRA adapter to apply, None for the model alone.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    arrival_s: float
    logprobs: LogprobOptions = NO_LOGPROBS
    service: Service = DEFAULT_SERVICE
    waited_s: float = 0.0
    traceparent: str = ""
    cache_salt: str = ""
    choice: int = 0
    returnable: bool = False
    resumable: bool = False
    output_ids: tuple[int, ...] = ()
    server_losses: int = 0
    hand_to: Destination | None = None
    adapter: Adapter | None = None


def blocks_for(tokens: int, block_size: int) -> int:
    """Number of blocks of `block_size` slots for `tokens` tokens."""
    return -(-tokens // block_size)


def admission_blocks(tokens: int, tokens_max: int, block_size: int) -> int:
    """Free blocks that a sequence of `tokens` tokens needs for admission.

    At most those for `tokens_max` tokens, its maximum length, so a sequence that fits alone can
    always be admitted.
    """
    # A spare block for growth: admission reserves no blocks for the output, and sequences are
    # preempted if blocks run out.
    return min(blocks_for(tokens, block_size) + 1, blocks_for(tokens_max, block_size))
