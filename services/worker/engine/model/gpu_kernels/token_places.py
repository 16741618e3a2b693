"""Weights and places of tokens, from which the Triton kernels `token_draw` choose.

Scores are logits, raw or after the rules of `logit_rules`. A row is divided into *spans* of SPAN
tokens, a span into *lanes* of LANE tokens. A token's *weight* is its probability relative to the
best token, whose score is the *peak*. A *mass* is a sum of weights, an integer in units of `UNIT`,
so that it does not depend on the order of summation. A token's *place* orders a row, best token
first: the bits of its distance to the peak, then the id, in an integer.

Top-k, top-p and min-p keep the tokens up to a place, and a draw takes the first token up to which
the kept tokens exceed a mass. `place_reaching` finds such places by their digits (radix
selection). It reads a *window*, a list of all tokens up to a *threshold*. If their mass does not
suffice, it reads a *wide* window, and if that has too many tokens, the whole row.

The *columns* of a row are its parameters, int64 [COLUMNS, rows]; numbers are the bits of float64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from math import factorial, log

import numpy as np
import triton
import triton.language as tl

SOURCE, SLOT, MASK, TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P, NUMBER, WANTED = map(
    tl.constexpr, range(9)
)
"""Columns: the row of the scores; the row of the token counts, negative for none; the row of the
masks, negative for none; the parameters of `DrawTerms` (top-k 0 for all tokens, the logarithm of
min-p); a random number in [0, 1); the number of tokens wanted in the window, 0 for no window."""
REPETITION, FREQUENCY, PRESENCE, BIASES, BANS, END = map(tl.constexpr, range(9, 15))
"""Columns: penalties; the first bias, the first banned token and the end of the entries."""
COLUMNS = 15

UNIT = 2.0**-44
_UNITS = tl.constexpr(1 / UNIT)
LOWEST = tl.constexpr(-3.4e38)
"""Tokens with a score below it are masked and never chosen."""
INFINITY = tl.constexpr(float("inf"))
_LOG2_E, _LN2 = tl.constexpr(float(np.float32(1 / log(2)))), tl.constexpr(log(2))
_LEAST = tl.constexpr(-87.0)
_T2, _T3, _T4, _T5, _T6, _T7 = (
    tl.constexpr(float(np.float32(1 / factorial(n)))) for n in range(2, 8)
)
ALL = tl.constexpr(2**63 - 1)
"""A place after all tokens."""


@triton.jit
def integer(columns, column: tl.constexpr, row, rows):
    """Return an integer of a row's columns."""
    return tl.load(columns + column * rows + row)


@triton.jit
def number(columns, column: tl.constexpr, row, rows):
    """Return a float64 of a row's columns."""
    return tl.load(columns + column * rows + row).to(tl.float64, bitcast=True)


@triton.jit
def _power(values):
    """Return e^values of float32 values that are at most 0; the bits of the kernel for CPUs."""
    clipped = tl.maximum(values, _LEAST)
    whole = tl.floor(clipped * _LOG2_E + 0.5)
    rest = (clipped.to(tl.float64) - whole.to(tl.float64) * _LN2).to(tl.float32)
    series = ((_T7 * rest + _T6) * rest + _T5) * rest + _T4
    series = (((series * rest + _T3) * rest + _T2) * rest + 1.0) * rest + 1.0
    scale = ((whole.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(values >= _LEAST, series * scale, 0.0)


@triton.jit
def scaled_by(values, peak, temperature):
    """Return (values − peak) / temperature in float32; minus infinity for NaN."""
    scaled = tl.div_rn(values - peak, temperature + tl.zeros_like(values))
    return tl.where(values == values, scaled, -INFINITY)


@triton.jit
def mass_of(scaled):
    """Return the weights of scaled values in units of `UNIT`: int64."""
    return (_power(scaled) * _UNITS).to(tl.int64)


@triton.jit
def places_of(scaled, ids, ID_BITS: tl.constexpr):
    """Return the places of tokens: int64, never negative."""
    bits = tl.abs(scaled).to(tl.int32, bitcast=True).to(tl.int64)
    return (bits << ID_BITS) | (ids & ((1 << ID_BITS) - 1))


@triton.jit
def tokens_of(
    scores, listed, first, size, peak, temperature,
    LISTED: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return places and masses of CHUNK tokens: LISTED those of the list, or those of the row.

    Masked tokens, and those from `size` on, come after all places and have no mass.
    """
    at = first + tl.arange(0, CHUNK)
    token = at
    if LISTED:
        token = tl.load(listed + at, at < size, 0)
    value = tl.load(scores + token, at < size, -INFINITY).to(tl.float32)
    scaled = scaled_by(value, peak, temperature)
    there = value >= LOWEST
    place = tl.where(there, places_of(scaled, token, ID_BITS), ALL)
    return place, tl.where(there, mass_of(scaled), 0)


@triton.jit
def mass_up_to(
    scores, listed, size, peak, temperature, limit,
    LISTED: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the mass of the tokens up to the place `limit`."""
    total = tl.zeros((CHUNK,), tl.int64)
    for first in range(0, size, CHUNK):
        place, mass = tokens_of(
            scores, listed, first, size, peak, temperature, LISTED, ID_BITS, CHUNK
        )
        total += tl.where(place <= limit, mass, 0)
    return tl.sum(total, 0)


@triton.jit
def place_reaching(
    scores, listed, size, peak, temperature, limit, target,
    COUNTS: tl.constexpr, LISTED: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Return the first place up to which the tokens up to `limit` have a mass of `target`.

    COUNTS: their number counts instead. The result comes after all tokens if they have less.
    """
    pivot = tl.arange(0, 16).to(tl.int64)
    prefix = tl.full((), 0, tl.int64)
    digits: tl.constexpr = (31 + ID_BITS + 3) // 4
    shift = tl.full((), 4 * digits, tl.int64)
    for _ in range(digits):
        shift -= 4
        # The largest places with each value of this digit, whose sums grow.
        upper = prefix | (pivot << shift) | ((tl.full((), 1, tl.int64) << shift) - 1)
        sums = tl.zeros((16,), tl.int64)
        for first in range(0, size, CHUNK):
            place, mass = tokens_of(
                scores, listed, first, size, peak, temperature, LISTED, ID_BITS, CHUNK
            )
            if COUNTS:
                mass = (place != ALL).to(tl.int64)
            mass = tl.where(place <= limit, mass, 0)
            sums += tl.sum(tl.where(place[None, :] <= upper[:, None], mass[None, :], 0), 1)
        short = tl.sum((sums < target).to(tl.int64), 0)
        prefix |= tl.minimum(short, 15) << shift
    return prefix
