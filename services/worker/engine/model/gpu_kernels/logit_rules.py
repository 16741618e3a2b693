"""Triton kernels that apply penalties, biases and masks to rows of logits, as `rules.py` does.

Columns are those of `token_places`. *Counts* say how often a token occurs in a sequence's output:
−1 if it occurs only in the prompt and a penalty reads the prompt, 0 if it has no penalty.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from services.worker.engine.model.gpu_kernels.token_places import (
    BANS,
    BIASES,
    END,
    FREQUENCY,
    MASK,
    PRESENCE,
    REPETITION,
    SLOT,
    integer,
    number,
)

_INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["rows", "vocab", "mask_width"])
def penalize(
    logits, scores, columns, counts, masks, rows, vocab, mask_width, SPAN: tl.constexpr,
):  # fmt: skip
    """Write `logits` with penalties and masks to `scores`, float32. Grid: [row, span].

    `masks` is int32 [any, mask_width]: a bit per token, 1 for allowed tokens.
    """
    row = tl.program_id(0)
    ids = tl.program_id(1) * SPAN + tl.arange(0, SPAN)
    there = ids < vocab
    at = row.to(tl.int64) * vocab + ids
    score = tl.load(logits + at, there, 0.0).to(tl.float32)
    slot = integer(columns, SLOT, row, rows)
    if slot >= 0:
        count = tl.load(counts + slot * vocab + ids, there, 0).to(tl.int32)
        occurrences = tl.maximum(count, 0).to(tl.float32)
        repetition = number(columns, REPETITION, row, rows).to(tl.float32)
        frequency = number(columns, FREQUENCY, row, rows).to(tl.float32)
        presence = number(columns, PRESENCE, row, rows).to(tl.float32)
        divided = tl.div_rn(score, repetition + tl.zeros_like(score))
        changed = tl.where(score > 0, divided, score * repetition)
        changed = changed - frequency * occurrences
        changed = changed - tl.where(count > 0, presence, 0.0)
        score = tl.where(count != 0, changed, score)
    mask = integer(columns, MASK, row, rows)
    if mask >= 0:
        word = tl.load(masks + mask * mask_width + ids // 32, there, 0)
        score = tl.where((word >> (ids % 32)) & 1 != 0, score, -_INFINITY)
    tl.store(scores + at, score, there)


@triton.jit(do_not_specialize=["rows", "vocab"])
def adjust(scores, columns, entries, rows, vocab, CHUNK: tl.constexpr):
    """Add biases to `scores`, then set banned tokens to minus infinity. Grid: [row].

    `entries` hold the id of a token in their lower half and a float32, the bias, in their upper
    half. A row has at most one bias per token.
    """
    row = tl.program_id(0)
    begin = integer(columns, BIASES, row, rows)
    bans = integer(columns, BANS, row, rows)
    end = integer(columns, END, row, rows)
    row_scores = scores + row.to(tl.int64) * vocab
    for first in range(begin, bans, CHUNK):
        at = first + tl.arange(0, CHUNK)
        entry = tl.load(entries + at, at < bans, 0)
        token = entry & 0xFFFFFFFF
        there = (at < bans) & (token < vocab)
        bias = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        score = tl.load(row_scores + token, there, 0.0)
        tl.store(row_scores + token, score + bias, there)
    # A token may have both: ban it after the bias was added.
    tl.debug_barrier()
    for first in range(bans, end, CHUNK):
        at = first + tl.arange(0, CHUNK)
        entry = tl.load(entries + at, at < end, 0)
        token = entry & 0xFFFFFFFF
        banned = tl.full((CHUNK,), -_INFINITY, tl.float32)
        tl.store(row_scores + token, banned, (at < end) & (token < vocab))
