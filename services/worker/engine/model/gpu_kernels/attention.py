"""Attention over a paged KV cache, block by block, without a copy of K and V.

The work is in *tiles*: one token that decodes, or some consecutive tokens of a prompt, with all
query heads that share a KV head. A long context is split over several programs, whose results
`combine` adds up (flash decoding).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["share", "splits", "most_tokens", "window"])
def attend(
    query, kv, tables, starts, counts, positions, firsts, parts, weights, scale, share, splits,
    most_tokens, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Attention of the tokens of a tile over a part of their context, by the block table.

    `query` and the result are [token, head, dim], `kv` is [block, 2, slot, kv_head, dim]. Tile i
    has `counts[i]` tokens from row `starts[i]` on, the first at position `positions[i]`; its blocks
    begin at `tables[firsts[i]]`. `scale` is that of scores times log2(e). A program reads `share`
    tokens of the context. WINDOWED: a token sees the last `window` positions alone.

    Without SPLIT to `parts`; else there, [tile, token, head, splits, dim] in float32 with
    `most_tokens` for each tile, and the logarithm of each part's weight to `weights`.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts + tile).to(tl.int64)
    count = tl.load(counts + tile).to(tl.int32)
    position = tl.load(positions + tile).to(tl.int32)
    table = tables + tl.load(firsts + tile).to(tl.int64)
    length = position + count
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(position - window + 1, 0) // TILE * TILE
    begin = tl.minimum(lowest + split * share, length)
    end = tl.minimum(begin + share, length)
    row = tl.arange(0, ROWS)
    token = row // GROUP
    real = token < count
    at = tl.arange(0, DIM)
    own = (start + token) * HEADS + head * GROUP + row % GROUP
    asked = tl.load(query + own[:, None] * DIM + at[None, :], real[:, None], 0.0)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    # Parts of the context that every row sees whole, then the others.
    whole = begin
    if not WINDOWED:
        whole = tl.maximum(begin, tl.minimum(end, position + 1) // TILE * TILE)
    for first in range(begin, whole, TILE):
        most, total, sums = _see(
            asked, kv, table, first, end, token + position, most, total, sums, scale, head, window,
            KV_HEADS, DIM, BLOCK, TILE, False, False,
        )  # fmt: skip
    for first in range(whole, end, TILE):
        most, total, sums = _see(
            asked, kv, table, first, end, token + position, most, total, sums, scale, head, window,
            KV_HEADS, DIM, BLOCK, TILE, True, WINDOWED,
        )  # fmt: skip
    divisor = tl.where(total > 0, total, 1.0)
    part = sums / divisor[:, None]
    if SPLIT:
        out = (tile.to(tl.int64) * most_tokens + token) * HEADS + head * GROUP + row % GROUP
        out = out * splits + split
        weight = tl.where(total > 0, most + tl.log2(divisor), float("-inf"))
        tl.store(parts + out[:, None] * DIM + at[None, :], part, real[:, None] & (begin < end))
        tl.store(weights + out, weight, real)
    else:
        target = parts + own[:, None] * DIM + at[None, :]
        tl.store(target, part.to(parts.dtype.element_ty), real[:, None])


@triton.jit
def _see(
    asked, kv, table, first, end, places, most, total, sums, scale, head, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """The running maximum, total and sums of `attend` after `TILE` more tokens of the context.

    Slots behind the last token may hold anything, so MASKED reads none of them.
    """
    tokens = first + tl.arange(0, TILE)
    at = tl.arange(0, DIM)
    there = tokens < end
    block = tl.load(table + tokens // BLOCK, there if MASKED else None).to(tl.int64)
    rows = (block * 2 * BLOCK + tokens % BLOCK) * KV_HEADS + head
    sources = kv + rows[:, None] * DIM + at[None, :]
    mask = there[:, None] if MASKED else None
    other = 0.0 if MASKED else None
    key = tl.load(sources, mask, other)
    score = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        seen = (tokens[None, :] <= places[:, None]) & there[None, :]
        if WINDOWED:
            seen &= tokens[None, :] > places[:, None] - window
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    # A row that has seen nothing yet: -inf less -inf is no number.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    portion = tl.exp2(score - level[:, None])
    kept = tl.exp2(most - level)
    value = tl.load(sources + BLOCK * KV_HEADS * DIM, mask, other)
    added = tl.dot(portion.to(value.dtype), value, input_precision="ieee")
    return higher, total * kept + tl.sum(portion, 1), sums * kept[:, None] + added


@triton.jit(do_not_specialize=["splits", "most_tokens"])
def combine(
    parts, weights, attended, starts, counts, splits, most_tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS_MAX: tl.constexpr,
):  # fmt: skip
    """`attended` [token, head, dim] from the parts of `attend`, one token and head a program."""
    tile = tl.program_id(0)
    token = tl.program_id(1)
    if token < tl.load(counts + tile):
        head = tl.program_id(2)
        row = (tl.load(starts + tile).to(tl.int64) + token) * HEADS + head
        part_row = (tile.to(tl.int64) * most_tokens + token) * HEADS + head
        at = tl.arange(0, DIM)
        split = tl.arange(0, SPLITS_MAX)
        place = part_row * splits + split
        weight = tl.load(weights + place, split < splits, float("-inf"))
        portion = tl.exp2(weight - tl.max(weight, 0))
        portion = portion / tl.sum(portion, 0)
        places = place[:, None] * DIM + at[None, :]
        part = tl.load(parts + places, (portion > 0)[:, None], 0.0)
        result = tl.sum(part * portion[:, None], 0)
        tl.store(attended + row * DIM + at, result.to(attended.dtype.element_ty))
