"""Calls torch's `at::native::cpublas::brgemm` from numba kernels, by its address.

It is oneDNN's batch-reduce GEMM, a matrix product of small tiles that torch's own kernels use.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_LONG = ir.IntType(64)


@intrinsic
def product(
    typing_context: Any, address: Any, rows: Any, columns: Any, depth: Any, left_stride: Any,
    right_stride: Any, sum_stride: Any, add: Any, left: Any, left_at: Any, right: Any,
    right_at: Any, sums: Any, sums_at: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Store `left` [rows, depth] · `right` [depth, columns] in `sums` [rows, columns].

    With `add`, add it to `sums`. `address`: that of `brgemm`. Each matrix starts at an element
    offset (`…_at`) of its array and has a stride in elements. `sums` is float32. `left` and `right`
    are bfloat16 bits; `right` interleaves pairs of its rows: [depth / 2, columns, 2] (VNNI layout).
    """
    assert left.dtype == types.uint16
    integer = types.int64
    signature = types.void(
        *(8 * [integer]), left, integer, right, integer, sums, integer
    )  # fmt: skip

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        def at(index: int) -> Any:
            kind = signature.args[index]
            made = context.make_array(kind)(context, builder, arguments[index])
            offset = builder.mul(arguments[index + 1], made.itemsize)
            return builder.ptrtoint(cgutils.pointer_add(builder, made.data, offset), _LONG)

        # The C++ function takes 64-bit integers and pointers, and then a bool: whether `right`
        # interleaves pairs. The bool occupies a 64-bit register as well.
        function = ir.FunctionType(ir.VoidType(), [_LONG] * 11).as_pointer()
        address, *numbers = arguments[:8]
        operands = [*numbers, at(8), at(10), at(12), _LONG(1)]
        builder.call(builder.inttoptr(address, function), operands)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def release(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Release the matrix registers (AMX tiles) after products; `address`: of torch's function."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_LONG]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), [_LONG(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate
