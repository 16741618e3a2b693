"""What a request is, in the words that every service shares."""

from dataclasses import dataclass
from enum import StrEnum

STOP_TOKEN_IDS_MAX = 256
"""Most stop tokens that a client may name."""
EOS_IDS_MAX = 64
"""Most end-of-sequence tokens that a model may have; they come on top of the client's."""


class FinishReason(StrEnum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch that filter off. Token `i` of a
    request depends on (`seed`, `i`) and the logits alone, so neither the batch that it runs in nor
    a preemption changes it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


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
class Request:
    """A generation request as the worker's planner sees it."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    arrival_s: float


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
