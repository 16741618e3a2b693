"""The exponential function by polynomials, for loops that numba vectorizes and for LLVM vectors."""

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
# Taylor series of 2^x for x in [-0.5, 0.5]; its error is below 1e-8.
_SERIES = [np.float32(log(2) ** n / factorial(n)) for n in range(8)]
_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7 = _SERIES
# Interpolation of 2^x for x in [0, 1] at five Chebyshev nodes. Its error is below 1e-5, which is
# little beside that of rounding to bfloat16, up to 4e-3.
_NODES = (1 - np.cos(np.pi * np.arange(1, 10, 2) / 10)) / 2
_ROUGH_SERIES = list(np.linalg.solve(np.vander(_NODES, increasing=True), np.exp2(_NODES)))
_TOWARDS_MINUS, _SAME_ROUNDING = 1, 4
"""Constants of instructions: `vreduceps` subtracts the next lower integer; unchanged rounding mode.
"""


@register_jitable(inline="always")
def exponential(number):  # type: ignore[no-untyped-def]
    """Return e^`number` in float32, clamped to the range of 2^-126 to 2^127."""
    # Range reduction: e^x = 2^whole · 2^rest with rest in [-0.5, 0.5].
    exponent = min(max(number * _LOG2_E, _LEAST), _LARGEST)
    whole = np.floor(exponent + float32(0.5))
    rest = exponent - whole
    power = ((_T7 * rest + _T6) * rest + _T5) * rest + _T4
    power = (((power * rest + _T3) * rest + _T2) * rest + _T1) * rest + _T0
    # Build 2^whole as a float32: the biased exponent in the upper 16 bits, with a zero mantissa.
    return power * float32_of(uint16((int32(whole) + int32(127)) << int32(7)))


def vector_exponential(builder: Any, numbers: Any) -> Any:
    """Emit `exponential` for a vector of float32 numbers that are at most 0."""
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
    """Emit e^((`numbers` - `peak`) · `scaling`), precise enough for rounding to bfloat16.

    All are vectors of 16 float32; requires AVX-512 (F and DQ). It takes half as many instructions
    as `vector_exponential`. Minus infinity yields 0.
    """
    kind = numbers.type
    scaling = builder.fmul(scaling, _each(kind, _LOG2_E))
    offset = builder.fneg(builder.fmul(peak, scaling))
    exponent = vector_call(builder, "fma", numbers, scaling, offset)
    mask, word = ir.Constant(ir.IntType(16), -1), ir.IntType(32)

    def masked(name: str, *arguments: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(kind, [argument.type for argument in arguments]),
            f"llvm.x86.avx512.mask.{name}.ps.512",
        )
        return builder.call(function, arguments)

    # `vreduceps` and `vscalefps` replace the range reduction and the assembly of the exponent.
    rest = masked("reduce", exponent, word(_TOWARDS_MINUS), numbers, mask, word(_SAME_ROUNDING))
    power = _polynomial(builder, _ROUGH_SERIES, rest)
    return masked("scalef", power, exponent, numbers, mask, word(_SAME_ROUNDING))


def _each(kind: Any, number: Any) -> Any:
    """Return a constant vector whose lanes are all `number`."""
    return ir.Constant(kind, [float(number)] * kind.count)


def _polynomial(builder: Any, series: Sequence[Any], numbers: Any) -> Any:
    """Emit a polynomial per lane (Horner); `series` starts with the constant coefficient."""
    power = _each(numbers.type, series[-1])
    for factor in series[-2::-1]:
        power = vector_call(builder, "fma", power, numbers, _each(numbers.type, factor))
    return power


def vector_call(builder: Any, name: str, *vectors: Any) -> Any:
    """Emit the call of an LLVM intrinsic on vectors of float32 without NaN."""
    kind = vectors[0].type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(kind, [kind] * len(vectors)),
        f"llvm.{name}.v{kind.count}f32",
    )
    return builder.call(function, vectors, fastmath=("nnan", "nsz"))
