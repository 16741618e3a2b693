"""The product of two small matrices: torch's where it has one in bfloat16, else by vectors."""

from numba import types
from numba.extending import overload, register_jitable

from services.worker.engine.model.cpu_kernels import brgemm
from services.worker.engine.model.cpu_kernels.vector_product import multiply

STEP_ROWS = 64
"""Rows of one product: what is read again for each panel stays in the first cache."""
_TURN_ROWS, _TURN_BYTES = 256, 1 << 20


def product(  # type: ignore[no-untyped-def]
    call, rows, columns, depth, left_stride, right_stride, sum_stride, add, left, left_at, right,
    right_at, sums, sums_at,
):  # fmt: skip
    """`sums` [rows, columns] = `left` [rows, depth] times `right` [depth, columns]; added if `add`.

    Arguments are those of `brgemm.product`, and `call` is its address, or 0 where vectors compute
    it, as they do in float32. There are at most 64 columns, and a line of `right` has 64.
    """


@overload(product)
def _choose(  # type: ignore[no-untyped-def]
    call, rows, columns, depth, left_stride, right_stride, sum_stride, add, left, left_at, right,
    right_at, sums, sums_at,
):  # fmt: skip
    def by_vectors(  # type: ignore[no-untyped-def]
        call, rows, columns, depth, left_stride, right_stride, sum_stride, add, left, left_at,
        right, right_at, sums, sums_at,
    ):  # fmt: skip
        _multiply(
            rows, columns, depth, left_stride, sum_stride, add, left, left_at, right, right_at,
            sums, sums_at,
        )  # fmt: skip

    def either(  # type: ignore[no-untyped-def]
        call, rows, columns, depth, left_stride, right_stride, sum_stride, add, left, left_at,
        right, right_at, sums, sums_at,
    ):  # fmt: skip
        if call:
            brgemm.product(
                call, rows, columns, depth, left_stride, right_stride, sum_stride, add, left,
                left_at, right, right_at, sums, sums_at,
            )  # fmt: skip
        else:
            _multiply(
                rows, columns, depth, left_stride, sum_stride, add, left, left_at, right, right_at,
                sums, sums_at,
            )  # fmt: skip

    return by_vectors if left.dtype == types.float32 else either


@register_jitable
def _multiply(  # type: ignore[no-untyped-def]
    rows, columns, depth, left_stride, sum_stride, add, left, left_at, right, right_at, sums,
    sums_at,
):  # fmt: skip
    begin = right.ctypes.data
    multiply(
        rows, columns, depth, left_stride, sum_stride, add, left.reshape(left.size), left_at,
        begin + right_at * right.itemsize, begin + right.nbytes, sums.reshape(sums.size), sums_at,
    )  # fmt: skip


@register_jitable
def rows_at_once(call, rows):  # type: ignore[no-untyped-def]
    """How many of `rows` [rows, in] a whole weight is multiplied with before the next ones come.

    Vectors take as long for a step as to read the weight again. torch's product may be much faster
    than memory: it needs more rows, if they stay in the second cache, or all of them.
    """
    if call == 0:
        return STEP_ROWS
    return _TURN_ROWS if _TURN_ROWS * rows.shape[1] * rows.itemsize <= _TURN_BYTES else len(rows)


@register_jitable
def release(call):  # type: ignore[no-untyped-def]
    """After products: leave the processor as other code expects it; `call` is an address, or 0."""
    if call:
        brgemm.release(call)
