"""Kernel of log probabilities and ranks of tokens, and of the most likely tokens, from logits.

A token's *weight* is its probability relative to the best token, whose logit is `peak`.
"""

import math
from collections.abc import Sequence
from functools import cache
from math import factorial, log
from typing import Any

import numpy as np
from numba import float32, float64, int32, types, uint16
from numba.extending import overload, register_jitable

from services.worker.engine.model.cpu_kernels.candidates import (
    Scratch,
    gather,
    lane_peaks,
    lane_threshold,
    select_prefix,
)
from services.worker.engine.model.cpu_kernels.compiler import compiled, float32_of
from services.worker.engine.model.cpu_kernels.kernel import Kernel

_LOG2_E, _LN2 = np.float32(1 / log(2)), log(2)
_LEAST = np.float32(-87.0)
"""Exponents below it would yield subnormal float32 values; they yield 0."""
# Taylor series of e^x for x in [-0.35, 0.35]; its error is below 1e-8.
_T2, _T3, _T4, _T5, _T6, _T7 = (np.float32(1 / factorial(n)) for n in range(2, 8))


def element(number: Any, row: Any) -> Any:
    """Return `number` in the dtype of the array `row`."""
    return row.dtype.type(number)


@overload(element)
def _element(number, row):  # type: ignore[no-untyped-def]
    kind = row.dtype
    return lambda number, row: kind(number)


def power(number: Any) -> Any:
    """Return e^`number` for a number that is at most 0, in its dtype."""
    return np.exp(number)


@overload(power)
def _power(number):  # type: ignore[no-untyped-def]
    return _float32_power if number == types.float32 else _float64_power


@register_jitable
def _float64_power(number):  # type: ignore[no-untyped-def]
    return math.exp(number)


@register_jitable
def _float32_power(number):  # type: ignore[no-untyped-def]
    """Return e^`number` with a relative error of about 1e-7; 0 for NaN."""
    clipped = max(number, _LEAST)
    whole = np.floor(clipped * _LOG2_E + float32(0.5))
    # Subtract in float64: rounding the reduced argument would lose digits of small powers.
    rest = float32(float64(clipped) - float64(whole) * _LN2)
    series = ((_T7 * rest + _T6) * rest + _T5) * rest + _T4
    series = (((series * rest + _T3) * rest + _T2) * rest + float32(1)) * rest + float32(1)
    # Build 2^whole as a float32: the biased exponent in the upper 16 bits, with a zero mantissa.
    scaled = series * float32_of(uint16((int32(whole) + int32(127)) << int32(7)))
    return scaled if number >= _LEAST else float32(0)


@register_jitable
def weight(logit, peak, temperature, least):  # type: ignore[no-untyped-def]
    """Return the weight of a token, or 0 if its logarithm is below `least`.

    All values have the dtype of the logits.
    """
    # Use numpy's division: Python's would check for zero, which prevents vectorization.
    scaled = np.true_divide(logit - peak, temperature)
    likelihood = power(scaled)
    # The difference is a zero of the dtype.
    return likelihood if scaled >= least else likelihood - likelihood


@register_jitable
def mass_of(row, peak, temperature, least):  # type: ignore[no-untyped-def]
    """Return the sum of the weights of a row, in float64."""
    total = 0.0
    for index in range(len(row)):
        total += float64(weight(row[index], peak, temperature, least))
    return total


_SIGNATURE = (
    "void({real}[:, ::1], int64[::1], int64[::1], {real}[::1], int32[::1], {real}[::1],"
    " float64[::1], int32[:, ::1], float64[:, ::1])"
)


def _score(  # type: ignore[no-untyped-def]
    logits, rows, tokens, lanes, ids, values, weights, out_ids, out_logprobs
):
    """Write `out_ids` and `out_logprobs` [row, 1 + top]: the token first, then the best tokens.

    Column 0 of `out_ids` is the token's rank.
    """
    top = out_logprobs.shape[1] - 1
    for index in range(len(rows)):
        row = logits[rows[index]]
        peak = lane_peaks(row, lanes)
        temperature = element(1.0, row)
        # Compute log-sum-exp relative to the maximum, so that the sum cannot overflow.
        base = peak + log(mass_of(row, peak, temperature, element(-np.inf, row)))
        own, better = row[tokens[index]], 0
        for token in range(len(row)):
            better += 1 if row[token] > own else 0
        out_ids[index, 0], out_logprobs[index, 0] = 1 + better, own - base
        if top:
            threshold = lane_threshold(lanes, top, ids, values, weights)
            count = gather(row, element(threshold, row), ids)
            for place in range(count):
                values[place], weights[place] = row[ids[place]], 1.0
            select_prefix(ids, values, weights, count, float(top), False)
            for place in range(top):
                # There are fewer candidates only if logits are NaN.
                out_ids[index, 1 + place] = ids[place] if place < count else place
                out_logprobs[index, 1 + place] = values[place] - base if place < count else np.nan


@cache
def _kernel(real: str) -> Kernel:
    kernel = compiled(_SIGNATURE.format(real=real))(_score)
    kernel.load()
    return kernel


# Compile for float32 at import; float64 is rare.
_kernel("float32")


class TokenScorer:
    """Scores tokens with a shared `scratch`. Not thread-safe."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._kernel = _kernel(scratch.dtype)

    def __call__(
        self, logits: np.ndarray, rows: Sequence[int], tokens: Sequence[int], top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Score `tokens[i]` and the `top` best tokens at row `rows[i]` of `logits` [any, vocab].

        Returns int32 [rows, 1 + top]: the rank of the token, from 1, and the ids of the `top` best
        tokens, best first; and their log probabilities, float64 of the same shape. Weights have the
        dtype of the logits and are summed in float64. Raises ValueError if the logits do not match
        the scratch.
        """
        self._scratch.check(logits)
        ids = np.empty((len(rows), 1 + top), np.int32)
        values = np.empty(ids.shape)
        self._kernel(
            np.ascontiguousarray(logits),
            np.array(rows, np.int64),
            np.array(tokens, np.int64),
            *self._scratch,
            ids,
            values,
        )
        # `select_prefix` selects the best tokens without ordering them.
        if top:
            order = np.lexsort((ids[:, 1:], -values[:, 1:]))
            ids[:, 1:] = np.take_along_axis(ids[:, 1:], order, 1)
            values[:, 1:] = np.take_along_axis(values[:, 1:], order, 1)
        return ids, values
