"""Triton kernels for the steps of a decoder layer between its matrix products."""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl


@triton.jit
def norm(residual, weight, normed, count, epsilon, WIDTH: tl.constexpr):
    """`normed` [rows, count] = RMSNorm(`residual`) · `weight`. A program per row."""
    row = tl.program_id(0).to(tl.int64) * count
    at = tl.arange(0, WIDTH)
    inside = at < count
    _store_norm(tl.load(residual + row + at, inside, 0.0).to(tl.float32), weight, normed + row,
                count, epsilon, at)  # fmt: skip


@triton.jit
def add_norm(update, residual, weight, normed, count, epsilon, WIDTH: tl.constexpr):
    """`residual` [rows, count] += `update`; `normed` = RMSNorm(`residual`) · `weight`."""
    row = tl.program_id(0).to(tl.int64) * count
    at = tl.arange(0, WIDTH)
    inside = at < count
    total = tl.load(update + row + at, inside, 0.0).to(tl.float32)
    total += tl.load(residual + row + at, inside, 0.0).to(tl.float32)
    # Normalize the rounded sum, as `transformers` does.
    stored = total.to(residual.dtype.element_ty)
    tl.store(residual + row + at, stored, inside)
    _store_norm(stored.to(tl.float32), weight, normed + row, count, epsilon, at)


@triton.jit
def _store_norm(values, weight, normed, count, epsilon, at):
    scale = 1.0 / tl.sqrt(tl.sum(values * values) / count + epsilon)
    factor = tl.load(weight + at, at < count, 0.0).to(tl.float32)
    tl.store(normed + at, (values * scale * factor).to(normed.dtype.element_ty), at < count)


@triton.jit
def gate(gate_up, inner, count, WIDTH: tl.constexpr):
    """`inner` [rows, count] = silu(gate) · up, from `gate_up` [rows, 2 × count]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    gate = tl.load(gate_up + row * 2 * count + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * count + count + at, inside, 0.0).to(tl.float32)
    result = gate / (1 + tl.exp(-gate)) * up
    tl.store(inner + row * count + at, result.to(inner.dtype.element_ty), inside)


@triton.jit
def rotate_and_store(
    qkv, cosines, sines, slots, query_norm, key_norm, query, kv, epsilon,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr,
):  # fmt: skip
    """Apply RoPE to q and k and store k and v in the cache. Grid: [token, heads of q, k and v].

    `qkv` is [token, heads of q, k, v, dim]; `cosines` and `sines` [token, dim] have equal halves.
    `slots[token]`: row of K in the cache viewed as [row, kv_head, dim], negative for padding; V is
    BLOCK rows later. NORMS: normalize each head of q and k first.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    at = tl.arange(0, HALF)
    # RoPE pairs element i of the first half of a head with element i of the second half.
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
        rotated = first * cosine - second * sine
        second = second * cosine + first * sine
        first = rotated
    if head < HEADS:
        target = query + (token * HEADS + head) * DIM
        tl.store(target + at, first.to(query.dtype.element_ty))
        tl.store(target + HALF + at, second.to(query.dtype.element_ty))
    else:
        row = tl.load(slots + token)
        # Padding tokens of CUDA graphs store nothing.
        real = row >= 0
        if head >= HEADS + KV_HEADS:
            row += BLOCK  # V is the second half of the block
        place = kv + (row * KV_HEADS + (head - HEADS) % KV_HEADS) * DIM
        tl.store(place + at, first.to(kv.dtype.element_ty), real)
        tl.store(place + HALF + at, second.to(kv.dtype.element_ty), real)
