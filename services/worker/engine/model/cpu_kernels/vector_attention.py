"""Attention of one new token, by products of whole vectors (`attention_products.py`).

To read keys and values takes longer than to compute with them, and a sequence's blocks lie anywhere
in memory, where the processor foresees nothing. So the row prefetches what it reads soon, line by
line among its products: many lines at once would hold up what is computed. One row of a model with
9 heads of 64 values, of 128 tokens that are in the cache, takes 2.6 microseconds in bfloat16; 64
such rows in 30 layers 10 ms, 22 if they prefetch nothing and 7 to read them (EPYC of family 26).
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
"""Scores of a row begin at multiples of it: loops over them use vectors only."""
AHEAD = 2
"""Half blocks between the one that is read and the one that is prefetched."""
_LEAST = np.float32(-3e38)


def in_pairs(stored: object) -> bool:
    """Whether the products of a cache of `stored` (a type of numba) are pairs of bfloat16."""
    return stored == types.uint16 and has_pair_products()


def values_at_once(stored: object) -> int:
    """How many values of a head the least product has."""
    return 2 * LANES if in_pairs(stored) else LANES


@register_jitable
def _half_ahead(seen, following, reads):  # type: ignore[no-untyped-def]
    """The block whose keys (0) or values (1) are due `AHEAD` after half `reads`, and which of them.

    A row reads the keys of all its blocks and then their values; then comes the row of `following`.
    The block is -1 if there is none.
    """
    due = reads + AHEAD
    if due < len(seen):
        return seen[due], 0
    if due < 2 * len(seen):
        return seen[due - len(seen)], 1
    due -= 2 * len(seen)
    return (following[due], 0) if due < len(following) else (-1, 0)


@register_jitable
def _prefetch_part(blocks, ahead, part, parts):  # type: ignore[no-untyped-def]
    """Prefetch one of `parts` parts of what `_half_ahead` has named."""
    block, half = ahead
    if block < 0:
        return
    size = blocks.strides[1]
    step = -(-size // (parts * CACHE_LINE_BYTES)) * CACHE_LINE_BYTES
    begin = part * step
    for offset in range(begin, min(begin + step, size), CACHE_LINE_BYTES):
        prefetch(blocks, block, half * size + offset)


@register_jitable
def _score(wanted, blocks, seen, following, scores):  # type: ignore[no-untyped-def]
    """`scores` [head, position] = `wanted` [head, head_dim] · the keys of the blocks in `seen`."""
    slots, heads = blocks.shape[2], len(wanted)
    sharing, parts = heads // blocks.shape[3], slots // LANES * heads
    for block in range(len(seen)):
        ahead = _half_ahead(seen, following, block)
        for group in range(slots // LANES):
            position = block * slots + group * LANES
            for head in range(heads):
                _prefetch_part(blocks, ahead, group * heads + head, parts)
                score_keys(
                    wanted, head, blocks, seen[block], group * LANES, head // sharing, scores,
                    position,
                )  # fmt: skip


@compiled("float32(float32[::1], int64, int64, float32, STORED[::1])")
def _weigh(scores, begin, end, scaling, weights):  # type: ignore[no-untyped-def]
    """`weights`: the softmax of `scores` from `begin` to `end`, times what is returned.

    Both have a length that whole loops over vectors cover; scores outside are overwritten.
    """
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
    """`output` [head, head_dim] = `weights` [head, position] · the values of the same blocks."""
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


def _factors(rows, blocks):  # type: ignore[no-untyped-def]
    """Stands for `rows` as the products with `blocks` take them."""


@overload(_factors)
def _made_factors(rows, blocks):  # type: ignore[no-untyped-def]
    def rounded(rows, blocks):  # type: ignore[no-untyped-def]
        made = np.empty(rows.shape, np.uint16)
        narrow_rows(rows, made)
        return made

    return rounded if in_pairs(blocks.dtype) else lambda rows, blocks: rows


def _room(scores, blocks):  # type: ignore[no-untyped-def]
    """Stands for as many weights as there are `scores`, as the products with `blocks` take them."""


@overload(_room)
def _made_room(scores, blocks):  # type: ignore[no-untyped-def]
    kind = np.uint16 if in_pairs(blocks.dtype) else np.float32
    return lambda scores, blocks: np.empty(scores.shape, kind)


@compiled(
    "void(float32[:, ::1], STORED[:, :, :, :, ::1], int64[::1], int64, int64, float32,"
    " int64[::1], float32[:, ::1], float32[:, ::1])"
)
def attend_row(  # type: ignore[no-untyped-def]
    query, blocks, seen, begin, end, scaling, following, scores, output
):
    """Attend with the heads of one row to positions `begin` to `end` of the blocks in `seen`.

    `scores` [head, position] is room, in rows of a multiple of `WHOLE`; `following` are the blocks
    of the next row, if there is one. A block has a multiple of `LANES` slots, a head one of
    `values_at_once` values.
    """
    heads, size = query.shape
    weights, totals = _room(scores, blocks), np.empty(heads, np.float32)
    _score(_factors(query, blocks), blocks, seen, following, scores)
    padded = -(-len(seen) * blocks.shape[2] // WHOLE) * WHOLE
    for head in range(heads):
        totals[head] = _weigh(scores[head, :padded], begin, end, scaling, weights[head, :padded])
    _collect(weights, blocks, seen, following, output)
    for head in range(heads):
        share = float32(1) / totals[head]
        for k in range(size):
            output[head, k] *= share
