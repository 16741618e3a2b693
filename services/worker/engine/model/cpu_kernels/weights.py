"""Weights of tokens: how likely each is, compared with the best one of its row."""

import math
from math import factorial, log
from typing import Any

import numpy as np
from numba import float32, float64, int32, types, uint16
from numba.extending import overload, register_jitable

from services.worker.engine.model.cpu_kernels.compiler import float32_of

_LOG2_E, _LN2 = np.float32(1 / log(2)), log(2)
_LEAST = np.float32(-87.0)
"""Below it a power leaves the normal numbers of float32; it counts as zero."""
# The Taylor series of e to the power of -0.35 to 0.35; its error is below 1e-8.
_T2, _T3, _T4, _T5, _T6, _T7 = (np.float32(1 / factorial(n)) for n in range(2, 8))


def element(number: Any, row: Any) -> Any:
    """`number` in the dtype of the array `row`."""
    return row.dtype.type(number)


@overload(element)
def _element(number, row):  # type: ignore[no-untyped-def]
    kind = row.dtype
    return lambda number, row: kind(number)


def power(number: Any) -> Any:
    """e to the power of a number that is at most 0, in its own dtype."""
    return np.exp(number)


@overload(power)
def _power(number):  # type: ignore[no-untyped-def]
    return _float32_power if number == types.float32 else _float64_power


@register_jitable
def _float64_power(number):  # type: ignore[no-untyped-def]
    return math.exp(number)


@register_jitable
def _float32_power(number):  # type: ignore[no-untyped-def]
    """It is right to about 1e-7 of itself. What is not a number has the power 0."""
    clipped = max(number, _LEAST)
    whole = np.floor(clipped * _LOG2_E + float32(0.5))
    # In float64: a rounded exponent would cost the last digits of small powers.
    rest = float32(float64(clipped) - float64(whole) * _LN2)
    series = ((_T7 * rest + _T6) * rest + _T5) * rest + _T4
    series = (((series * rest + _T3) * rest + _T2) * rest + float32(1)) * rest + float32(1)
    # A float32 without mantissa: the upper half of its bits is the exponent, biased.
    found = series * float32_of(uint16((int32(whole) + int32(127)) << int32(7)))
    return found if number >= _LEAST else float32(0)


@register_jitable
def weight(logit, peak, temperature, least):  # type: ignore[no-untyped-def]
    """How likely a token is, compared with that of logit `peak`, which is the best.

    It is 0 if its logarithm is below `least`. All are in the dtype of the logits.
    """
    # numpy's division: that of Python would look for a zero in every round of a loop.
    scaled = np.true_divide(logit - peak, temperature)
    found = power(scaled)
    return found if scaled >= least else found - found


@register_jitable
def mass_of(row, peak, temperature, least):  # type: ignore[no-untyped-def]
    """The sum of the weights of a row, in float64."""
    total = 0.0
    for index in range(len(row)):
        total += float64(weight(row[index], peak, temperature, least))
    return total
