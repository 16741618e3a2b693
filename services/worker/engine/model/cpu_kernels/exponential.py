"""The exponential as a few products, which the compiler can vectorise, and of a whole vector."""

from math import factorial, log
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, uint16
from numba.core import cgutils
from numba.extending import register_jitable

from services.worker.engine.model.cpu_kernels.compiler import float32_of

_LOG2_E = np.float32(1 / log(2))
_LEAST, _LARGEST = np.float32(-126), np.float32(127)
# The Taylor series of 2 to the power of -0.5 to 0.5; its error is below 1e-8.
_SERIES = [np.float32(log(2) ** n / factorial(n)) for n in range(8)]
_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7 = _SERIES


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


def vector_exponential(builder: Any, numbers: Any) -> Any:
    """`exponential` of each lane of a vector of float32 that are 0 or less, as instructions."""
    kind = numbers.type

    def each(number: Any) -> Any:
        return ir.Constant(kind, [float(number)] * kind.count)

    exponent = vector_call(builder, "maxnum", builder.fmul(numbers, each(_LOG2_E)), each(_LEAST))
    whole = vector_call(builder, "rint", exponent)
    rest = builder.fsub(exponent, whole)
    power = each(_SERIES[-1])
    for factor in _SERIES[-2::-1]:
        power = vector_call(builder, "fma", power, rest, each(factor))
    word = ir.VectorType(ir.IntType(32), kind.count)
    biased = builder.add(builder.fptosi(whole, word), ir.Constant(word, [127] * kind.count))
    bits = builder.shl(biased, ir.Constant(word, [23] * kind.count))
    return builder.fmul(power, builder.bitcast(bits, kind))


def vector_call(builder: Any, name: str, *vectors: Any) -> Any:
    """An operation of LLVM on vectors of float32, which are numbers."""
    kind = vectors[0].type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind] * len(vectors)),
        f"llvm.{name}.v{kind.count}f32",
    )
    return builder.call(function, vectors, fastmath=("nnan", "nsz"))
