"""The exponential as a few products, which the compiler can vectorise, and of a whole vector."""

from collections.abc import Sequence
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
# A polynomial through five Chebyshev nodes for 2 to the power of 0 to 1. Its error is below 1e-5,
# that of bfloat16 up to 4e-3.
_NODES = (1 - np.cos(np.pi * np.arange(1, 10, 2) / 10)) / 2
_ROUGH_SERIES = list(np.linalg.solve(np.vander(_NODES, increasing=True), np.exp2(_NODES)))
_TOWARDS_MINUS, _SAME_ROUNDING = 1, 4
"""Modes: `vreduceps` gives what is left above the whole number below; both round as ever."""


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
    exponent = builder.fmul(numbers, _each(kind, _LOG2_E))
    exponent = vector_call(builder, "maxnum", exponent, _each(kind, _LEAST))
    whole = vector_call(builder, "rint", exponent)
    rest = builder.fsub(exponent, whole)
    power = _polynomial(builder, _SERIES, rest)
    word = ir.VectorType(ir.IntType(32), kind.count)
    biased = builder.add(builder.fptosi(whole, word), ir.Constant(word, [127] * kind.count))
    bits = builder.shl(biased, ir.Constant(word, [23] * kind.count))
    return builder.fmul(power, builder.bitcast(bits, kind))


def rough_exponential(builder: Any, numbers: Any, peak: Any, scaling: Any) -> Any:
    """e to the power of (`numbers` - `peak`) * `scaling`, close enough to be rounded to bfloat16.

    All are vectors of 16 float32, for which the processor has AVX-512 (F and DQ). It takes half as
    many instructions as `vector_exponential`. Minus infinity gives 0.
    """
    kind = numbers.type
    scaling = builder.fmul(scaling, _each(kind, _LOG2_E))
    offset = builder.fneg(builder.fmul(peak, scaling))
    exponent = vector_call(builder, "fma", numbers, scaling, offset)
    mask, word = ir.Constant(ir.IntType(16), -1), ir.IntType(32)

    def masked(name: str, *arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [one.type for one in arguments]),
            f"llvm.x86.avx512.mask.{name}.ps.512",
        )
        return builder.call(function, arguments)

    rest = masked("reduce", exponent, word(_TOWARDS_MINUS), numbers, mask, word(_SAME_ROUNDING))
    power = _polynomial(builder, _ROUGH_SERIES, rest)
    return masked("scalef", power, exponent, numbers, mask, word(_SAME_ROUNDING))


def _each(kind: Any, number: Any) -> Any:
    """A vector whose lanes are all `number`."""
    return ir.Constant(kind, [float(number)] * kind.count)


def _polynomial(builder: Any, series: Sequence[Any], numbers: Any) -> Any:
    """The polynomial with the factors `series`, from the constant one on, of each lane."""
    power = _each(numbers.type, series[-1])
    for factor in series[-2::-1]:
        power = vector_call(builder, "fma", power, numbers, _each(numbers.type, factor))
    return power


def vector_call(builder: Any, name: str, *vectors: Any) -> Any:
    """An operation of LLVM on vectors of float32, which are numbers."""
    kind = vectors[0].type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind] * len(vectors)),
        f"llvm.{name}.v{kind.count}f32",
    )
    return builder.call(function, vectors, fastmath=("nnan", "nsz"))
