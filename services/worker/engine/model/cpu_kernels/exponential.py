"""The exponential as a few products, which the compiler can vectorise."""

from math import factorial, log

import numpy as np
from numba import float32, int32, uint16
from numba.extending import register_jitable

from services.worker.engine.model.cpu_kernels.compiler import float32_of

_LOG2_E = np.float32(1 / log(2))
_LEAST, _LARGEST = np.float32(-126), np.float32(127)
# The Taylor series of 2 to the power of -0.5 to 0.5; its error is below 1e-8.
_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7 = (np.float32(log(2) ** n / factorial(n)) for n in range(8))


@register_jitable(inline="always")
def exponential(number):  # type: ignore[no-untyped-def]
    """e to the power of a float32, clamped to 2 to the power of -126 and 127."""
    exponent = min(max(number * _LOG2_E, _LEAST), _LARGEST)
    whole = np.floor(exponent + float32(0.5))
    rest = exponent - whole
    power = ((_T7 * rest + _T6) * rest + _T5) * rest + _T4
    power = (((power * rest + _T3) * rest + _T2) * rest + _T1) * rest + _T0
    # A float32 without mantissa: the upper half of its bits is the exponent, biased.
    return power * float32_of(uint16((int32(whole) + int32(127)) << int32(7)))
