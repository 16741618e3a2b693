"""Triton kernel of log probabilities and ranks, as `cpu_kernels.token_scores`.

The terms are those of `token_places`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

import triton
import triton.language as tl

from services.worker.engine.model.gpu_kernels.token_places import (
    ALL,
    SOURCE,
    UNIT,
    integer,
    places_of,
    scaled_by,
)

_UNIT = tl.constexpr(UNIT)


@triton.jit
def _next_place(
    scores, listed, size, peak, last,
    LISTED: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the first place after `last`, of the LISTED tokens or of the row."""
    best = tl.full((CHUNK,), ALL, tl.int64)
    for first in range(0, size, CHUNK):
        at = first + tl.arange(0, CHUNK)
        token = at
        if LISTED:
            token = tl.load(listed + at, at < size, 0)
        value = tl.load(scores + token, at < size, float("nan")).to(tl.float32)
        place = places_of(scaled_by(value, peak, 1.0), token, ID_BITS)
        place = tl.where(value == value, place, ALL)
        best = tl.minimum(best, tl.where(place > last, place, ALL))
    return tl.min(best, 0)


@triton.jit(do_not_specialize=["rows", "vocab", "spans", "room", "top"])
def score(
    scores, columns, row_peaks, sizes, span_masses, window, tokens, ids, logprobs,
    rows, vocab, spans, room, top,
    SPANS: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Score `tokens[SOURCE]`, and find the `top` best tokens of each row. Grid: [row].

    `ids` int32 [rows, 1 + top] receives the rank of the token, from 1, and the best tokens, best
    first; `logprobs` float32 of the same shape their log probabilities.
    """
    row = tl.program_id(0)
    source = integer(columns, SOURCE, row, rows)
    row_scores = scores + source * vocab
    peak = tl.load(row_peaks + row)
    at = tl.arange(0, SPANS)
    mass = tl.sum(tl.load(span_masses + row * spans + at, at < spans, 0), 0)
    base = peak.to(tl.float64) + tl.log(mass.to(tl.float64) * _UNIT)
    # Token −1 stands for no token.
    own = tl.load(row_scores + tl.maximum(tl.load(tokens + source), 0)).to(tl.float32)
    better = tl.zeros((CHUNK,), tl.int32)
    for first in range(0, vocab, CHUNK):
        token = first + tl.arange(0, CHUNK)
        value = tl.load(row_scores + token, token < vocab, float("nan")).to(tl.float32)
        better += (value > own).to(tl.int32)
    out = row * (1 + top)
    tl.store(ids + out, 1 + tl.sum(better, 0))
    tl.store(logprobs + out, (own.to(tl.float64) - base).to(tl.float32))
    size = tl.load(sizes + row)
    last = tl.full((), -1, tl.int64)
    for place in range(top):
        if size <= room:
            listed = window + row * room
            last = _next_place(row_scores, listed, size, peak, last, True, ID_BITS, CHUNK)
        else:
            last = _next_place(row_scores, window, vocab, peak, last, False, ID_BITS, CHUNK)
        # There are fewer tokens only if logits are NaN.
        there = last != ALL
        token = tl.where(there, (last & ((1 << ID_BITS) - 1)).to(tl.int32), place)
        value = tl.load(row_scores + token).to(tl.float64) - base
        tl.store(ids + out + 1 + place, token)
        tl.store(logprobs + out + 1 + place, tl.where(there, value, float("nan")).to(tl.float32))
