"""The product of two small matrices: torch's where it has one in bfloat16, else by vectors."""

from numba import types
from numba.extending import overload, register_jitable

from services.worker.engine.memory.panels import PANEL
from services.worker.engine.model.cpu_kernels import brgemm
from services.worker.engine.model.cpu_kernels.vector_product import multiply

STEP_ROWS = 64
"""The most rows of one product."""
_CACHED_BYTES, _CACHED_LEAST, _CACHED_MOST = 1 << 20, 4 * STEP_ROWS, 8 * STEP_ROWS
"""What stays in the second cache of rows, and how many rows are worth that."""


def product(  # type: ignore[no-untyped-def]
    call, rows, columns, depth, left_stride, sum_stride, add, left, left_at, right,
    right_at, sums, sums_at,
):  # fmt: skip
    """`sums` [rows, columns] = `left` [rows, depth] times `right` [depth, columns]; added if `add`.

    Arguments are those of `brgemm.product`, and `call` is its address, or 0 where vectors compute
    it, as they do in float32. There are at most `PANEL` columns, and a line of `right` has `PANEL`.
    """


@overload(product)
def _choose(  # type: ignore[no-untyped-def]
    call, rows, columns, depth, left_stride, sum_stride, add, left, left_at, right,
    right_at, sums, sums_at,
):  # fmt: skip
    def by_vectors(  # type: ignore[no-untyped-def]
        call, rows, columns, depth, left_stride, sum_stride, add, left, left_at,
        right, right_at, sums, sums_at,
    ):  # fmt: skip
        _multiply(
            rows, columns, depth, left_stride, sum_stride, add, left, left_at, right, right_at,
            sums, sums_at,
        )  # fmt: skip

    def either(  # type: ignore[no-untyped-def]
        call, rows, columns, depth, left_stride, sum_stride, add, left, left_at,
        right, right_at, sums, sums_at,
    ):  # fmt: skip
        if call:
            brgemm.product(
                call, rows, columns, depth, left_stride, PANEL, sum_stride, add, left, left_at,
                right, right_at, sums, sums_at,
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
    """How many of `rows` [rows, in] to multiply with a whole weight before going on; at least 1.

    More rows at once read the weight less often, fewer rows stay in a cache. Vectors take so long
    for 64 rows that to read the weight again costs little. torch's product with AMX needs more: on
    a Xeon of family 6, model 207, the products of 2,048 rows with a weight of SmolLM2-135M do 890
    to 1,050 GFLOP/s by 256 or 512 rows, 610 to 770 with all at once, and its layers take 1.34 s
    instead of 1.43. With 4,096 inputs, of which 256 rows fill the second cache, all at once are
    faster.
    """
    if call == 0:
        return STEP_ROWS
    fitting = _CACHED_BYTES // (rows.shape[1] * rows.itemsize) // STEP_ROWS * STEP_ROWS
    return min(fitting, _CACHED_MOST) if fitting >= _CACHED_LEAST else max(1, len(rows))


@register_jitable
def release(call):  # type: ignore[no-untyped-def]
    """After products: leave the processor as other code expects it; `call` is an address, or 0."""
    if call:
        brgemm.release(call)
