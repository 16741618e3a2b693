"""Triton kernels of attention over a paged KV cache, without a copy of K and V.

A program (a Triton thread block) computes a *tile*: a decode token, or consecutive tokens of a
prompt, with all query heads of a KV head. A long context is split over several programs; `combine`
merges their partial results (flash decoding).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["share", "splits", "most_tokens", "window"])
def attend(
    query, kv, tables, starts, counts, positions, firsts, lowests, parts, weights, scale, share,
    splits, most_tokens, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, WINDOWED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Attend with the tokens of a tile to a part of their context. Grid: [tile, kv_head, split].

    `query` is [token, head, dim], `kv` is [block, 2, slot, kv_head, dim]. Tile i has `counts[i]`
    tokens from row `starts[i]` on, the first at position `positions[i]`; its blocks start at
    `tables[firsts[i]]`. It sees no position below `lowests[i]`. `scale`: scaling of scores ×
    log2(e). A program reads `share` tokens of the context. WINDOWED: a token sees only the last
    `window` positions.

    Without SPLIT, `parts` is the result [token, head, dim]. With SPLIT, it is [tile, token, head,
    splits, dim] in float32 with `most_tokens` per tile, and `weights` receives the log2 of the
    softmax denominator of each part.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts + tile).to(tl.int64)
    count = tl.load(counts + tile).to(tl.int32)
    position = tl.load(positions + tile).to(tl.int32)
    table = tables + tl.load(firsts + tile).to(tl.int64)
    length = position + count
    # The part of the context that this program reads: [begin, end).
    lowest = tl.load(lowests + tile).to(tl.int32)
    if WINDOWED:
        lowest = tl.maximum(position - window + 1, 0) // TILE * TILE
    begin = tl.minimum(lowest + split * share, length)
    end = tl.minimum(begin + share, length)
    # Rows are tokens × the query heads of the KV head; rows beyond `count` are padding.
    row = tl.arange(0, ROWS)
    token = row // GROUP
    real = token < count
    at = tl.arange(0, DIM)
    own = (start + token) * HEADS + head * GROUP + row % GROUP
    queries = tl.load(query + own[:, None] * DIM + at[None, :], real[:, None], 0.0)  # [ROWS, DIM]
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    # First read the keys that every row sees (without a mask), then the others.
    whole = begin
    if not WINDOWED:
        whole = begin + tl.maximum(tl.minimum(end, position + 1) - begin, 0) // TILE * TILE
    for first in range(begin, whole, TILE):
        most, total, sums = _accumulate(
            queries, kv, table, first, end, token + position, most, total, sums, scale, head,
            window, KV_HEADS, DIM, BLOCK, TILE, False, False,
        )  # fmt: skip
    for first in range(whole, end, TILE):
        most, total, sums = _accumulate(
            queries, kv, table, first, end, token + position, most, total, sums, scale, head,
            window, KV_HEADS, DIM, BLOCK, TILE, True, WINDOWED,
        )  # fmt: skip
    # A row without visible keys in this part has total 0: do not divide by it.
    divisor = tl.where(total > 0, total, 1.0)
    part = sums / divisor[:, None]
    if SPLIT:
        out = (tile.to(tl.int64) * most_tokens + token) * HEADS + head * GROUP + row % GROUP
        out = out * splits + split
        # log2 of the part's softmax denominator, by which `combine` weighs it.
        weight = tl.where(total > 0, most + tl.log2(divisor), float("-inf"))
        tl.store(parts + out[:, None] * DIM + at[None, :], part, real[:, None] & (begin < end))
        tl.store(weights + out, weight, real)
    else:
        target = parts + own[:, None] * DIM + at[None, :]
        tl.store(target, part.to(parts.dtype.element_ty), real[:, None])


@triton.jit
def _accumulate(
    queries, kv, table, first, end, places, most, total, sums, scale, head, window,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Online softmax step: returns `most` (maximum), `total` and `sums` after `TILE` more keys.

    `total` and `sums` are the softmax denominator and the weighted sums of values, relative to
    `most`. `places` [ROWS]: position of each row. MASKED: apply the causal mask, and read no key
    from `end` on.
    """
    tokens = first + tl.arange(0, TILE)
    at = tl.arange(0, DIM)
    # Do not load slots after the last token, which may contain NaN.
    there = tokens < end
    block = tl.load(table + tokens // BLOCK, there if MASKED else None).to(tl.int64)
    rows = (block * 2 * BLOCK + tokens % BLOCK) * KV_HEADS + head
    sources = kv + rows[:, None] * DIM + at[None, :]
    mask = there[:, None] if MASKED else None
    other = 0.0 if MASKED else None
    key = tl.load(sources, mask, other)
    # "ieee": no TF32 for float32 inputs. Scores are on the log2 scale (see `scale`).
    score = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
    if MASKED:
        visible = (tokens[None, :] <= places[:, None]) & there[None, :]
        if WINDOWED:
            visible &= tokens[None, :] > places[:, None] - window
        score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    # In a row without visible keys so far, -inf - -inf would be NaN.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    portion = tl.exp2(score - level[:, None])
    kept = tl.exp2(most - level)  # rescales the state to the new maximum
    value = tl.load(sources + BLOCK * KV_HEADS * DIM, mask, other)
    added = tl.dot(portion.to(value.dtype), value, input_precision="ieee")
    return higher, total * kept + tl.sum(portion, 1), sums * kept[:, None] + added


@triton.jit(do_not_specialize=["splits", "most_tokens"])
def combine(
    parts, weights, attended, starts, counts, splits, most_tokens,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS_MAX: tl.constexpr,
):  # fmt: skip
    """Merge the parts of `attend` into `attended` [token, head, dim]. Grid: [tile, token, head]."""
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
        # The softmax of the parts' log-denominators is the share of each part.
        portion = tl.exp2(weight - tl.max(weight, 0))
        portion = portion / tl.sum(portion, 0)
        places = place[:, None] * DIM + at[None, :]
        # Parts without visible keys were never written: do not load them.
        part = tl.load(parts + places, (portion > 0)[:, None], 0.0)
        result = tl.sum(part * portion[:, None], 0)
        tl.store(attended + row * DIM + at, result.to(attended.dtype.element_ty))
