"""Kernel of decode attention with vector products (`attention_products.py`).

Reading keys and values takes longer than computing with them, and the blocks of a sequence are
scattered in memory, so the CPU's own prefetching fails. Each row (a decode step) therefore
prefetches its next blocks, a few cache lines per product, because many prefetches at once would
stall the computation. A row of a model with 9 heads of 64 values and a cached context of 128 tokens
takes 2.6 microseconds in bfloat16; 64 such rows in 30 layers take 10 ms, 22 ms without prefetching,
and 7 ms for the memory reads alone (EPYC of family 26).

*Factors* are what keys and values are multiplied by: queries and softmax weights.
"""

import numpy as np
from numba import float32, types
from numba.extending import overload, register_jitable

from services.worker.engine.model.cpu_kernels.attention_products import (
    LANES,
    collect_values,
    score_keys,
)
from services.worker.engine.model.cpu_kernels.bfloat16 import has_pair_products
from services.worker.engine.model.cpu_kernels.compiler import (
    CACHE_LINE_BYTES,
    compiled,
    larger,
    narrow,
    prefetch,
)
from services.worker.engine.model.cpu_kernels.exponential import exponential
from services.worker.engine.model.cpu_kernels.panel_gemm import narrow_rows

WHOLE = 64
"""Rows of scores are padded to a multiple of it, so that vectorized loops have no remainder."""
AHEAD = 2
"""Prefetch distance in half blocks (keys or values of a block)."""
_LEAST = np.float32(-3e38)


def in_pairs(stored: object) -> bool:
    """Whether products with a cache of the numba type `stored` use pairs of bfloat16."""
    return stored == types.uint16 and has_pair_products()


def values_at_once(stored: object) -> int:
    """Return the number of values of a head per vector product."""
    return 2 * LANES if in_pairs(stored) else LANES


@register_jitable
def _half_ahead(seen, following, reads):  # type: ignore[no-untyped-def]
    """Return the (block, half) to prefetch at half block `reads` of a row; half 0 is keys.

    A row reads the keys of all its blocks, then their values; the next row starts with the keys of
    `following`. Block -1: nothing to prefetch.
    """
    # `due` is an index into: keys of the row's blocks, their values, keys of the next row.
    due = reads + AHEAD
    if due < len(seen):
        return seen[due], 0
    if due < 2 * len(seen):
        return seen[due - len(seen)], 1
    due -= 2 * len(seen)
    return (following[due], 0) if due < len(following) else (-1, 0)


@register_jitable
def _prefetch_part(blocks, ahead, part, parts):  # type: ignore[no-untyped-def]
    """Prefetch part `part` of `parts` of the half block `ahead` (see `_half_ahead`)."""
    block, half = ahead
    if block < 0:
        return
    size = blocks.strides[1]
    step = -(-size // (parts * CACHE_LINE_BYTES)) * CACHE_LINE_BYTES
    begin = part * step
    for offset in range(begin, min(begin + step, size), CACHE_LINE_BYTES):
        prefetch(blocks, block, half * size + offset)


@register_jitable
def _score(queries, blocks, seen, following, scores):  # type: ignore[no-untyped-def]
    """`scores` [head, position] = `queries` [head, head_dim] · keys of the blocks in `seen`."""
    slots, heads = blocks.shape[2], len(queries)
    sharing, parts = heads // blocks.shape[3], slots // LANES * heads
    for block in range(len(seen)):
        ahead = _half_ahead(seen, following, block)
        for group in range(slots // LANES):
            position = block * slots + group * LANES
            # A few cache lines per product, so that prefetches overlap with the computation.
            for head in range(heads):
                _prefetch_part(blocks, ahead, group * heads + head, parts)
                score_keys(
                    queries, head, blocks, seen[block], group * LANES, head // sharing, scores,
                    position,
                )  # fmt: skip


@compiled("float32(float32[::1], int64, int64, float32, STORED[::1])")
def _weigh(scores, begin, end, scaling, weights):  # type: ignore[no-untyped-def]
    """Write unnormalized softmax `weights` of `scores` from `begin` to before `end`.

    Returns their sum. The length of both arrays is a multiple of `WHOLE`; scores outside the
    interval are overwritten.
    """
    # Mask before the loops, so that they run over whole vectors without a condition.
    scores[:begin] = _LEAST
    scores[end:] = _LEAST
    peak = _LEAST
    for index in range(len(scores)):
        peak = larger(peak, scores[index])
    total = float32(0)
    for index in range(len(scores)):
        weight = exponential((scores[index] - peak) * scaling)
        total += weight
        weights[index] = narrow(weight, weights)
    weights[:begin] = 0
    weights[end:] = 0
    return total


@register_jitable
def _collect(weights, blocks, seen, following, output):  # type: ignore[no-untyped-def]
    """`output` [head, head_dim] = `weights` [head, position] · values of the blocks in `seen`."""
    slots, kv_heads = blocks.shape[2], blocks.shape[3]
    sharing, parts = len(weights) // kv_heads, slots // LANES * kv_heads
    output[:] = 0
    for block in range(len(seen)):
        ahead = _half_ahead(seen, following, len(seen) + block)
        for group in range(slots // LANES):
            position = block * slots + group * LANES
            for kv_head in range(kv_heads):
                _prefetch_part(blocks, ahead, group * kv_heads + kv_head, parts)
                collect_values(
                    weights, position, blocks, seen[block], group * LANES, kv_head, output,
                    kv_head * sharing, (kv_head + 1) * sharing,
                )  # fmt: skip


def _as_factors(rows, blocks):  # type: ignore[no-untyped-def]
    """Convert `rows` to the factor type of products with `blocks` (see `_choose_as_factors`)."""


@overload(_as_factors)
def _choose_as_factors(rows, blocks):  # type: ignore[no-untyped-def]
    def rounded(rows, blocks):  # type: ignore[no-untyped-def]
        narrowed = np.empty(rows.shape, np.uint16)
        narrow_rows(rows, narrowed)
        return narrowed

    return rounded if in_pairs(blocks.dtype) else lambda rows, blocks: rows


def _weights_for(scores, blocks):  # type: ignore[no-untyped-def]
    """Allocate weights for `scores` in the factor type of products with `blocks`."""


@overload(_weights_for)
def _choose_weights_for(scores, blocks):  # type: ignore[no-untyped-def]
    kind = np.uint16 if in_pairs(blocks.dtype) else np.float32
    return lambda scores, blocks: np.empty(scores.shape, kind)


@compiled(
    "void(float32[:, ::1], STORED[:, :, :, :, ::1], int64[::1], int64, int64, float32,"
    " int64[::1], float32[:, ::1], float32[:, ::1])"
)
def attend_row(  # type: ignore[no-untyped-def]
    query, blocks, seen, begin, end, scaling, following, scores, output
):
    """Attend with all heads of a row to the positions from `begin` to before `end` in `seen`.

    Positions count from the start of the blocks `seen`. `scores` [head, position] is scratch, with
    rows padded to a multiple of `WHOLE`. `following`: the blocks of the next row, empty after the
    last row. The slots per block are a multiple of `LANES`, head_dim of `values_at_once`.
    """
    heads, size = query.shape
    weights, totals = _weights_for(scores, blocks), np.empty(heads, np.float32)
    _score(_as_factors(query, blocks), blocks, seen, following, scores)
    # Compute the softmax over padded rows, without a scalar loop for a remainder.
    padded = -(-len(seen) * blocks.shape[2] // WHOLE) * WHOLE
    for head in range(heads):
        totals[head] = _weigh(scores[head, :padded], begin, end, scaling, weights[head, :padded])
    _collect(weights, blocks, seen, following, output)
    # Normalize the output instead of the weights, which are rounded to the storage dtype.
    for head in range(heads):
        share = float32(1) / totals[head]
        for k in range(size):
            output[head, k] *= share
