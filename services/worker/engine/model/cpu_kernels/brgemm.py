"""torch's product of two small matrices, called from compiled code by its address.

torch exports the product that its own kernels are made of (`at::native::cpublas::brgemm`, oneDNN's
batch-reduce product).
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
    """`sums` [rows, columns] = `left` [rows, depth] times `right` [depth, columns]; added if `add`.

    Each matrix begins at an element of its array, counted from the first one, and has a stride in
    elements. `sums` are float32. `left` has the bits of bfloat16, and so has `right`, in which
    pairs of its rows lie beside each other: [depth / 2, columns, 2].
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

        # Every argument has a place of eight bytes, also the bool at the end: `right` has pairs.
        function = ir.FunctionType(ir.VoidType(), [_LONG] * 11).as_pointer()
        address, *numbers = arguments[:8]
        operands = [*numbers, at(8), at(10), at(12), _LONG(1)]
        builder.call(builder.inttoptr(address, function), operands)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def release(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Leave matrix registers (AMX) as other code expects them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_LONG]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), [_LONG(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate
