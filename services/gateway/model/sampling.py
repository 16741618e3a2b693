"""Determines the sampling options of a request from its body and the model's defaults."""

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.core.request import (
    BAD_WORD_TOKENS_MAX,
    BAD_WORDS_MAX,
    PROMPT_LOGPROBS_MAX,
    LogprobOptions,
    Sampling,
)
from services.gateway.api.fields import INT32_MAX
from services.gateway.api.generation import CHOICE_IDS_MAX, OUTPUT_TOKENS_MAX, GenerationRequest
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.vocabulary.errors import BadRequest

SEED_BITS = 63
TEMPERATURE = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of fields that a client omits.

    `max_tokens`: maximum output tokens; None means as many as the context allows.
    """

    temperature: float = TEMPERATURE
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None


PLAIN_DEFAULTS = SamplingDefaults()
"""The defaults of the OpenAI API."""


def check_ids(body: GenerationRequest, vocab_size: int) -> None:
    """Raise BadRequest if a field has a token id outside the vocabulary."""
    ids_by_field = {
        "stop_token_ids": body.stop_token_ids or (),
        "allowed_token_ids": body.allowed_token_ids or (),
        "logit_bias": [token_id for token_id, _ in body.logit_bias],
    }
    for name, ids in ids_by_field.items():
        if ids and max(ids) >= vocab_size:
            raise BadRequest(
                f"'{name}' must be below the vocabulary's size {vocab_size}", param=name
            )
    if body.top_k is not None and body.top_k > vocab_size:
        raise BadRequest(
            f"'top_k' must be at most the vocabulary's size {vocab_size}", param="top_k"
        )


def sampling_of(
    body: GenerationRequest, defaults: SamplingDefaults, bad_words: tuple[tuple[int, ...], ...]
) -> Sampling:
    """Return the sampling options of the first choice; a missing seed is drawn at random."""
    seed = body.seed if body.seed is not None else secrets.randbits(SEED_BITS)
    return Sampling(
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        # A negative seed stands for its two's complement.
        seed=seed % 2**64,
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=body.logit_bias,
        bad_words=bad_words,
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
    )


def check_choices(
    prompt_tokens: int, prompts: int, n: int, sampling: Sampling, prompt_field: str
) -> None:
    """Raise BadRequest if `n` choices of each prompt have too many token ids together.

    `prompt_tokens` is the number of tokens of all prompts, which are in the field `prompt_field`.
    """
    counts = {
        "logit_bias": 2 * len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
        "allowed_token_ids": len(sampling.allowed_token_ids),
    }
    ids = n * (prompt_tokens + prompts * sum(counts.values()))
    if ids > CHOICE_IDS_MAX:
        # The error names the field with the most tokens.
        counts[prompt_field] = prompt_tokens // prompts
        param = max(counts, key=lambda name: counts[name])
        raise BadRequest(
            f"{n * prompts} choices name {ids} tokens in their prompts, 'logit_bias', 'bad_words'"
            f" and 'allowed_token_ids' together, but at most {CHOICE_IDS_MAX} are allowed; ask for"
            " fewer choices, or send several requests",
            param=param,
        )


def kept_output_tokens(body: GenerationRequest) -> int:
    """Maximum output tokens of each choice, so that the gateway can keep all choices in memory.

    Raises:
        BadRequest: if the body asks for more.
    """
    if body.stream or body.all_choices == 1:
        return INT32_MAX
    kept, wanted = OUTPUT_TOKENS_MAX // body.all_choices, body.output_limit()
    if wanted is not None and wanted > kept:
        raise BadRequest(
            f"{body.all_choices} choices of up to {wanted} tokens exceed {OUTPUT_TOKENS_MAX}"
            " output tokens together; lower 'max_tokens' or 'n', or stream",
            param="max_tokens",
        )
    return kept


def choice_seed(seed: int, choice: int) -> int:
    """Return the seed of a choice: `seed` for the first, for others a hash of seed and number."""
    if choice == 0:
        return seed
    digested = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(digested, digest_size=8).digest(), "little")


def bad_word_ids(bad_words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, with and without a leading space.

    Raises:
        BadRequest: if there are too many words or tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        # Vocabularies have separate tokens for a word at the start of a text and after a space.
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, False, BAD_WORD_TOKENS_MAX, param="bad_words"))
            if ids:
                sequences[ids] = None
    if len(sequences) > BAD_WORDS_MAX or sum(map(len, sequences)) > BAD_WORD_TOKENS_MAX:
        raise BadRequest(
            f"'bad_words' make {len(sequences)} sequences of {sum(map(len, sequences))} tokens,"
            f" but at most {BAD_WORDS_MAX} sequences of {BAD_WORD_TOKENS_MAX} tokens are allowed;"
            " send fewer or shorter words",
            param="bad_words",
        )
    return tuple(sequences)


def logprob_options(body: GenerationRequest, echo: bool, prompt_tokens: int) -> LogprobOptions:
    """Return the log probabilities that the worker computes.

    `prompt_tokens` is the number of prompt tokens of all choices together.

    Raises:
        BadRequest: if the prompts have too many log probabilities.
    """
    output = body.output_logprobs
    # `echo` with `logprobs` (completions) covers the prompt as well.
    wanted = [top for top in (body.prompt_logprobs, output if echo else None) if top is not None]
    prompt = max(wanted, default=None)
    if prompt is not None and prompt_tokens * (1 + prompt) > PROMPT_LOGPROBS_MAX:
        raise BadRequest(
            f"{prompt_tokens} prompt tokens (of all choices) with {prompt} alternatives each have"
            f" more than {PROMPT_LOGPROBS_MAX} log probabilities; ask for fewer, or send shorter"
            " prompts",
            param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
        )
    return LogprobOptions(output, prompt)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
