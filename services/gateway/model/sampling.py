"""Sampling options of core, from a body's fields and the model's defaults."""

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
from services.gateway.api.generation import CHOICE_IDS_MAX, GenerationRequest
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.vocabulary.errors import BadRequest

SEED_BITS = 63
TEMPERATURE = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of fields that a client leaves out.

    `max_tokens`: most output tokens, None for what the context allows.
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
    """Raise BadRequest if a field names a token that the model does not have."""
    named = {
        "stop_token_ids": body.stop_token_ids or (),
        "allowed_token_ids": body.allowed_token_ids or (),
        "logit_bias": [token_id for token_id, _ in body.logit_bias],
    }
    for name, ids in named.items():
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
    """The sampling of a body's first choice; without a seed one is drawn."""
    seed = body.seed if body.seed is not None else secrets.randbits(SEED_BITS)
    return Sampling(
        temperature=_or(body.temperature, defaults.temperature),
        top_p=_or(body.top_p, defaults.top_p),
        top_k=max(0, _or(body.top_k, defaults.top_k)),
        # Negative seeds are allowed and mean what their bits mean.
        seed=seed % 2**64,
        min_p=_or(body.min_p, defaults.min_p),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=body.logit_bias,
        bad_words=bad_words,
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
    )


def check_choices(prompt_tokens: int, prompts: int, n: int, sampling: Sampling, where: str) -> None:
    """Raise BadRequest if `n` choices of each prompt name too many tokens together.

    `prompt_tokens` are those of all prompts, which stand in the field `where`.
    """
    named = {
        "logit_bias": 2 * len(sampling.logit_bias),
        "bad_words": sum(map(len, sampling.bad_words)),
        "allowed_token_ids": len(sampling.allowed_token_ids),
    }
    ids = n * (prompt_tokens + prompts * sum(named.values()))
    if ids > CHOICE_IDS_MAX:
        named[where] = prompt_tokens // prompts
        param = max(named, key=lambda name: named[name])
        raise BadRequest(
            f"{n * prompts} choices name {ids} tokens in their prompts, 'logit_bias', 'bad_words'"
            f" and 'allowed_token_ids' together, but {CHOICE_IDS_MAX} are the most; ask for fewer"
            " choices, or send several requests",
            param=param,
        )


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice `choice` of a prompt: the first has `seed`, others one that follows."""
    if choice == 0:
        return seed
    told = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word, with a blank before it and without.

    Raises:
        BadRequest: if they are too many.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, False, BAD_WORD_TOKENS_MAX, param="bad_words"))
            if ids:
                found[ids] = None
    if len(found) > BAD_WORDS_MAX or sum(map(len, found)) > BAD_WORD_TOKENS_MAX:
        raise BadRequest(
            f"'bad_words' make {len(found)} sequences of {sum(map(len, found))} tokens, but"
            f" {BAD_WORDS_MAX} of {BAD_WORD_TOKENS_MAX} are the most; send fewer or shorter ones",
            param="bad_words",
        )
    return tuple(found)


def logprob_options(body: GenerationRequest, echo: bool, prompt_tokens: int) -> LogprobOptions:
    """Which log probabilities the worker tells; `prompt_tokens` are those of all choices.

    Raises:
        BadRequest: if they are too many.
    """
    output = body.output_logprobs
    wanted = [top for top in (body.prompt_logprobs, output if echo else None) if top is not None]
    prompt = max(wanted, default=None)
    if prompt is not None and prompt_tokens * (1 + prompt) > PROMPT_LOGPROBS_MAX:
        raise BadRequest(
            f"log probabilities of {prompt_tokens} prompt tokens (of all choices) with {prompt}"
            f" beside each are more than {PROMPT_LOGPROBS_MAX} numbers; ask for fewer, or send"
            " shorter prompts",
            param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
        )
    return LogprobOptions(output, prompt)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
