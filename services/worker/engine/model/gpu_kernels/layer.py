"""What a decoder layer does between its products."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def norm(rest, weight, normed, count, epsilon, WIDTH: tl.constexpr):
    """`normed` [rows, count] is the RMS norm of `rest` times `weight`."""
    row = tl.program_id(0).to(tl.int64) * count
    at = tl.arange(0, WIDTH)
    inside = at < count
    _store_norm(tl.load(rest + row + at, inside, 0.0).to(tl.float32), weight, normed + row, count,
                epsilon, at)  # fmt: skip


@triton.jit
def add_norm(added, rest, weight, normed, count, epsilon, WIDTH: tl.constexpr):
    """`rest` [rows, count] += `added`; `normed` is the RMS norm of that times `weight`."""
    row = tl.program_id(0).to(tl.int64) * count
    at = tl.arange(0, WIDTH)
    inside = at < count
    total = tl.load(added + row + at, inside, 0.0).to(tl.float32)
    total += tl.load(rest + row + at, inside, 0.0).to(tl.float32)
    stored = total.to(rest.dtype.element_ty)
    tl.store(rest + row + at, stored, inside)
    _store_norm(stored.to(tl.float32), weight, normed + row, count, epsilon, at)


@triton.jit
def _store_norm(values, weight, normed, count, epsilon, at):
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / count + epsilon)
    factor = tl.load(weight + at, at < count, 0.0).to(tl.float32)
    tl.store(normed + at, (values * scale * factor).to(normed.dtype.element_ty), at < count)


@triton.jit
def gate(both, inner, count, WIDTH: tl.constexpr):
    """`inner` [rows, count] = silu(gate) · up, from `both` [rows, gate and up]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    gate = tl.load(both + row * 2 * count + at, inside, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * count + count + at, inside, 0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(inner + row * count + at, result.to(inner.dtype.element_ty), inside)


@triton.jit
def rotate_and_store(
    qkv, cosines, sines, slots, query_norm, key_norm, query, kv, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """One head of q, k or v of a token: q and k turned by its position, k and v to the cache.

    `qkv` is [token, heads of q, k, v, dim]; `cosines` and `sines` [token, dim] have equal halves.
    `slots[token]` is the row of its K in the cache seen as [row, kv_head, dim], negative for none;
    V lies a block's tokens later. NORMS: each head of q and k is normed first.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    at = tl.arange(0, HALF)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    first = tl.load(source + at).to(tl.float32)
    second = tl.load(source + HALF + at).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORMS:
            squares = tl.sum(first * first) + tl.sum(second * second)
            scale = 1.0 / tl.sqrt(squares / DIM + epsilon)
            weight = query_norm if head < HEADS else key_norm
            first *= scale * tl.load(weight + at).to(tl.float32)
            second *= scale * tl.load(weight + HALF + at).to(tl.float32)
        cosine = tl.load(cosines + token * DIM + at).to(tl.float32)
        sine = tl.load(sines + token * DIM + at).to(tl.float32)
        turned = first * cosine - second * sine
        second = second * cosine + first * sine
        first = turned
    if head < HEADS:
        target = query + (token * HEADS + head) * DIM
        tl.store(target + at, first.to(query.dtype.element_ty))
        tl.store(target + HALF + at, second.to(query.dtype.element_ty))
    else:
        row = tl.load(slots + token)
        real = row >= 0
        if head >= HEADS + KV_HEADS:
            row += BLOCK
        place = kv + (row * KV_HEADS + (head - HEADS) % KV_HEADS) * DIM
        tl.store(place + at, first.to(kv.dtype.element_ty), real)
        tl.store(place + HALF + at, second.to(kv.dtype.element_ty), real)
