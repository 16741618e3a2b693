"""The GEMM micro-kernel (product of small tiles): torch's brgemm if usable, else vectors.

brgemm only multiplies bfloat16; `vector_product.py` also multiplies float32.
"""

from numba import types
from numba.extending import overload, register_jitable

from services.worker.engine.memory.panels import PANEL
from services.worker.engine.model.cpu_kernels import brgemm
from services.worker.engine.model.cpu_kernels.vector_product import multiply

STEP_ROWS = 64
"""Maximum rows per call of `product`."""
_CACHED_BYTES, _CACHED_LEAST, _CACHED_MOST = 1 << 20, 4 * STEP_ROWS, 8 * STEP_ROWS
"""Bytes of the L2 cache for a block of rows, and minimum and maximum rows of a block."""


def product(  # type: ignore[no-untyped-def]
    call, rows, columns, depth, left_stride, sum_stride, add, left, left_at, right,
    right_at, sums, sums_at,
):  # fmt: skip
    """Write `left` [rows, depth] · `right` [depth, columns] to `sums`; add to it if `add`.

    Arguments as for `brgemm.product`. `call` is the address of brgemm; 0, or float32, selects the
    vector product. There are at most `PANEL` columns; a line of `right` has exactly `PANEL`.
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
    """Return the number of `rows` [rows, in] to multiply by a whole weight per block, at least 1.

    A larger block reads the weight less often; a smaller block stays in the cache.
    """
    # For the vector product use small blocks: it is so slow that reading the weight again for the
    # next 64 rows costs little.
    if call == 0:
        return STEP_ROWS
    # AMX needs larger blocks: on a Xeon of family 6, model 207, products of 2,048 rows with a
    # weight of SmolLM2-135M reach 890 to 1,050 GFLOP/s in blocks of 256 or 512 rows, 610 to 770
    # without blocks, and the layers take 1.34 s instead of 1.43 s. With 4,096 inputs, 256 rows fill
    # L2, and a single block is faster.
    fitting = _CACHED_BYTES // (rows.shape[1] * rows.itemsize) // STEP_ROWS * STEP_ROWS
    return min(fitting, _CACHED_MOST) if fitting >= _CACHED_LEAST else max(1, len(rows))


@register_jitable
def release(call):  # type: ignore[no-untyped-def]
    """Release AMX registers after products; `call` is an address of `panel_calls`, or 0."""
    if call:
        brgemm.release(call)
