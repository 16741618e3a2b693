"""Kernels of `gpu_decoder.py` besides products, in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def add_norm(hidden, rest, weight, normed, count, WIDTH: tl.constexpr):
    """`rest` [rows, count] += `hidden`; `normed` is its RMS norm times `weight`."""
    row = tl.program_id(0).to(tl.int64) * count
    at = tl.arange(0, WIDTH)
    inside = at < count
    total = tl.load(hidden + row + at, inside, 0.0).to(tl.float32)
    total += tl.load(rest + row + at, inside, 0.0).to(tl.float32)
    tl.store(rest + row + at, total.to(tl.bfloat16), inside)
    scale = 1.0 / tl.sqrt(tl.sum(total * total) / count + 1e-6)
    factor = tl.load(weight + at, inside, 0.0).to(tl.float32)
    tl.store(normed + row + at, (total * scale * factor).to(tl.bfloat16), inside)


@triton.jit
def gate(both, inner, count, WIDTH: tl.constexpr):
    """`inner` [rows, count] = silu(gate) · up, from `both` [rows, gate and up]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    gate = tl.load(both + row * 2 * count + at, inside, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * count + count + at, inside, 0.0).to(tl.float32)
    tl.store(inner + row * count + at, (gate / (1 + tl.exp(-gate)) * up).to(tl.bfloat16), inside)


@triton.jit
def rotate_and_store(
    qkv, cos, sin, positions, slots, query, kv,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v of a token: q and k turned by its position, k and v to the cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    at = tl.arange(0, HALF)
    source = qkv + token * (HEADS + 2 * KV_HEADS) * DIM + head * DIM
    first = tl.load(source + at).to(tl.float32)
    second = tl.load(source + HALF + at).to(tl.float32)
    if head < HEADS + KV_HEADS:
        place = tl.load(positions + token) * HALF + at
        c = tl.load(cos + place)
        s = tl.load(sin + place)
        turned = first * c - second * s
        second = second * c + first * s
        first = turned
    if head < HEADS:
        target = query + token * HEADS * DIM + head * DIM
    else:
        row = tl.load(slots + token)
        if head >= HEADS + KV_HEADS:
            row += BLOCK
        target = kv + (row * KV_HEADS + (head - HEADS) % KV_HEADS) * DIM
    tl.store(target + at, first.to(tl.bfloat16))
    tl.store(target + HALF + at, second.to(tl.bfloat16))


@triton.jit
def attend(
    query, kv, tables, starts, counts, positions, owners, parts, weights, scale, table_width,
    share,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Attention of the rows of a tile over a part of their context, by the block table.

    With one split to `parts`, else there in float32, with the logarithm of its weight.
    """
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(starts + tile).to(tl.int64)
    count = tl.load(counts + tile)
    position = tl.load(positions + tile)
    table = tables + tl.load(owners + tile).to(tl.int64) * table_width
    length = position + count
    begin = tl.minimum(split * share, length)
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
    # Tiles that every row sees whole, then the others.
    whole = tl.maximum(begin, tl.minimum(end, position + 1) // TILE * TILE)
    for first in range(begin, whole, TILE):
        most, total, sums = see(
            asked, kv, table, first, end, token + position, most, total, sums, scale, head,
            KV_HEADS, DIM, BLOCK, TILE, False,
        )  # fmt: skip
    for first in range(whole, end, TILE):
        most, total, sums = see(
            asked, kv, table, first, end, token + position, most, total, sums, scale, head,
            KV_HEADS, DIM, BLOCK, TILE, True,
        )  # fmt: skip
    divisor = tl.where(total > 0, total, 1.0)
    part = sums / divisor[:, None]
    if SPLITS == 1:
        tl.store(parts + own[:, None] * DIM + at[None, :], part.to(tl.bfloat16), real[:, None])
    else:
        out = own * SPLITS + split
        weight = tl.where(total > 0, most + tl.log2(divisor), float("-inf"))
        tl.store(parts + out[:, None] * DIM + at[None, :], part, real[:, None] & (begin < end))
        tl.store(weights + out, weight, real)


@triton.jit
def see(
    asked, kv, table, first, end, places, most, total, sums, scale, head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running maximum, total and sums of `attend` after `TILE` more tokens of the context."""
    tokens = first + tl.arange(0, TILE)
    at = tl.arange(0, DIM)
    if MASKED:
        block = tl.load(table + tokens // BLOCK, tokens < end, 0).to(tl.int64)
    else:
        block = tl.load(table + tokens // BLOCK).to(tl.int64)
    rows = (block * 2 * BLOCK + tokens % BLOCK) * KV_HEADS + head
    sources = kv + rows[:, None] * DIM + at[None, :]
    key = tl.load(sources)
    score = tl.dot(asked, tl.trans(key)) * scale
    if MASKED:
        seen = (tokens[None, :] <= places[:, None]) & (tokens[None, :] < end)
        score = tl.where(seen, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    # A row that has seen nothing yet: -inf less -inf is no number.
    level = tl.where(higher == float("-inf"), 0.0, higher)
    share = tl.exp2(score - level[:, None])
    kept = tl.exp2(most - level)
    value = tl.load(sources + BLOCK * KV_HEADS * DIM)
    sums = sums * kept[:, None] + tl.dot(share.to(tl.bfloat16), value)
    return higher, total * kept + tl.sum(share, 1), sums


@triton.jit
def combine(
    parts, weights, attended, starts, counts,
    HEADS: tl.constexpr, DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """`attended` from the splits of `attend`, one token and head a program."""
    tile = tl.program_id(0)
    token = tl.program_id(1)
    if token < tl.load(counts + tile):
        row = (tl.load(starts + tile).to(tl.int64) + token) * HEADS + tl.program_id(2)
        at = tl.arange(0, DIM)
        split = tl.arange(0, SPLITS)
        weight = tl.load(weights + row * SPLITS + split)
        portion = tl.exp2(weight - tl.max(weight, 0))
        portion = portion / tl.sum(portion, 0)
        places = (row * SPLITS + split)[:, None] * DIM + at[None, :]
        part = tl.load(parts + places, (portion > 0)[:, None], 0.0)
        tl.store(attended + row * DIM + at, tl.sum(part * portion[:, None], 0).to(tl.bfloat16))
