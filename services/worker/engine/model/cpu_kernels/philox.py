"""Philox4x64-10 (Philox §3), a counter-based random number generator, as a kernel."""

import numpy as np
from numba import float64, uint64
from numba.extending import register_jitable

from services.worker.engine.model.cpu_kernels.compiler import compiled

_FACTOR0, _FACTOR1 = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_STEP0, _STEP1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)
_ROUNDS = 10
_HALF, _LOW_HALF = np.uint64(32), np.uint64(0xFFFFFFFF)
_DROPPED_BITS, _RESOLUTION = np.uint64(11), 2.0**-53


@register_jitable(inline="always")
def _upper(first, second):  # type: ignore[no-untyped-def]
    """Return the upper 64 bits of the product of two uint64, from products of their halves."""
    low0, high0 = first & _LOW_HALF, first >> _HALF
    low1, high1 = second & _LOW_HALF, second >> _HALF
    mixed0, mixed1 = low0 * high1, high0 * low1
    carried = ((low0 * low1) >> _HALF) + (mixed0 & _LOW_HALF) + (mixed1 & _LOW_HALF)
    return high0 * high1 + (mixed0 >> _HALF) + (mixed1 >> _HALF) + (carried >> _HALF)


@compiled("void(uint64[:, ::1], uint64[::1], float64[::1])")
def _fill(keys, counters, numbers):  # type: ignore[no-untyped-def]
    for index in range(len(numbers)):
        key0, key1 = keys[index, 0], keys[index, 1]
        part0, part1, part2, part3 = counters[index], uint64(0), uint64(0), uint64(0)
        # A round multiplies, permutes the four words and adds the Weyl sequence to the key.
        for _ in range(_ROUNDS):
            upper0, upper1 = _upper(_FACTOR0, part0), _upper(_FACTOR1, part2)
            lower0, lower1 = _FACTOR0 * part0, _FACTOR1 * part2
            part0, part1 = upper1 ^ part1 ^ key0, lower1
            part2, part3 = upper0 ^ part3 ^ key1, lower0
            key0 += _STEP0
            key1 += _STEP1
        # Use the upper 53 bits as the mantissa of a number in [0, 1).
        numbers[index] = float64(part0 >> _DROPPED_BITS) * _RESOLUTION


_fill.load()


def uniform_numbers(keys: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return uniform numbers in [0, 1) for counters `indices[i]` and `keys[i]`: float64 [numbers].

    `keys` [numbers, 2] and `indices` are uint64. Equal to the first number of numpy's
    `Generator(Philox(key=…, counter=…))`.
    """
    numbers = np.empty(len(keys))
    # Add 1, because numpy increments the counter before each draw.
    _fill(keys, indices + np.uint64(1), numbers)
    return numbers
