"""The batches of a profile: a grid to fit the cost model, and random batches to validate the fit.

A batch is a sequence of chunks (prefix, new): the context tokens already in the KV cache, and the
new tokens to compute. A chunk with a single new token is a decode step, others are prefills.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from services.core.cost.model import Chunks
from services.core.request import blocks_for

HELD_OUT_KINDS = ("prefill", "prefill after prefix", "decode", "mixed")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of a batch on a model runner, in tokens, sequences and KV blocks."""

    max_batch_tokens: int
    max_running: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def allows(self, chunks: Chunks) -> bool:
        """Whether the batch is within the limits."""
        blocks = sum(blocks_for(prefix + new, self.block_size) for prefix, new in chunks)
        return (
            sum(new for _, new in chunks) <= self.max_batch_tokens
            and len(chunks) <= self.max_running
            and max(prefix + new for prefix, new in chunks) <= self.max_model_len
            and blocks <= self.num_blocks
        )


@dataclass(frozen=True, slots=True)
class Effort:
    """The grid to measure, and the target time of all measurements.

    Prefills: all `prefixes` × `new_tokens`. Decodes: all numbers `decodes` × `contexts`, if
    their product is at most `decode_context_tokens`. `held_out_each`: validation batches of
    each kind.
    """

    prefixes: tuple[int, ...]
    new_tokens: tuple[int, ...]
    decodes: tuple[int, ...]
    contexts: tuple[int, ...]
    held_out_each: int
    target_s: float
    decode_context_tokens: int = 16_384


FULL = Effort(
    prefixes=(0, 128, 512, 2048, 4096),
    new_tokens=(2, 8, 32, 64, 128, 256),
    decodes=(1, 2, 4, 8, 16, 32, 64),
    contexts=(16, 128, 512, 2048),
    held_out_each=8,
    target_s=100.0,
)
QUICK = Effort(
    prefixes=(0, 256, 1024),
    new_tokens=(4, 16, 64, 256),
    decodes=(1, 4, 16, 64),
    contexts=(16, 128, 1024),
    held_out_each=4,
    target_s=35.0,
)
GPU = Effort(
    prefixes=(0, 512, 2048, 8192),
    new_tokens=(16, 64, 128, 256, 512, 1024, 2048),
    decodes=(1, 4, 16, 64, 128, 256),
    contexts=(128, 512, 2048, 8192),
    held_out_each=8,
    target_s=40.0,
    decode_context_tokens=160_000,
)
IDLE = replace(QUICK, target_s=0.0)
"""For an idle worker: with the minimum number of repeats."""


def fit_batches(effort: Effort, limits: BatchLimits) -> list[Chunks]:
    """Return the batches within `limits` to which the cost model is fitted."""
    prefills: list[Chunks] = [((p, c),) for p in effort.prefixes for c in effort.new_tokens]
    # Limit the total context of a decode batch, which determines its time and its KV blocks.
    decodes: list[Chunks] = [
        _decodes(n, p)
        for n in effort.decodes
        for p in effort.contexts
        if n * p <= effort.decode_context_tokens
    ]
    # Only batches of several prefills and mixed batches identify the costs of a chunk (γ), of a
    # batch (λ) and of a token (β).
    several: list[Chunks] = [
        ((p, c),) * n for p in (0, 256) for n, c in ((2, 16), (4, 16), (3, 32))
    ]
    mixed: list[Chunks] = [(*_decodes(n, 128), (p, 32)) for n in (2, 8) for p in (0, 256)]
    return _distinct([*prefills, *decodes, *several, *mixed], limits)


def _decodes(count: int, context: int) -> Chunks:
    """Return `count` decodes with contexts of half to twice `context`, on a log scale."""
    if count == 1:
        return ((context, 1),)
    # Vary the lengths as real batches do. Attention groups decodes of similar length, so equal
    # lengths are the cheapest case: a fit to them predicted 12 % too little, on average, for the
    # held-out decodes.
    return tuple((round(context * 4 ** (index / (count - 1) - 0.5)), 1) for index in range(count))


def held_out_batches(effort: Effort, limits: BatchLimits, rng: Random) -> dict[str, list[Chunks]]:
    """Return the validation batches by kind; the fit excludes them."""
    points: dict[str, list[Chunks]] = {}
    for kind in HELD_OUT_KINDS:
        drawn = [_draw(kind, effort, rng) for _ in range(effort.held_out_each)]
        points[kind] = _distinct(drawn, limits)
    return points


def _draw(kind: str, effort: Effort, rng: Random) -> Chunks:
    """Draw a random batch of a kind, with log-uniform sizes."""
    after_prefix = kind == "prefill after prefix" or (kind == "mixed" and rng.random() < 0.5)
    chunks: list[tuple[int, int]] = []
    if kind in ("decode", "mixed"):
        count = _log_uniform(rng, 2, max(effort.decodes))
        longest = min(max(effort.contexts), effort.decode_context_tokens // count)
        chunks += [(_log_uniform(rng, 16, longest), 1) for _ in range(count)]
    if kind != "decode":
        longest = max(effort.prefixes)
        for _ in range(rng.randint(1, 3)):
            prefix = _log_uniform(rng, 32, longest) if after_prefix else 0
            chunks.append((prefix, _log_uniform(rng, 4, max(effort.new_tokens) // 3)))
    return tuple(chunks)


def _log_uniform(rng: Random, low: int, high: int) -> int:
    return round(low * (high / low) ** rng.random())


def _distinct(points: Sequence[Chunks], limits: BatchLimits) -> list[Chunks]:
    return [chunks for chunks in dict.fromkeys(points) if limits.allows(chunks)]
