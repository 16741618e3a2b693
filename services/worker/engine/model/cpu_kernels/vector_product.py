"""A GEMM micro-kernel with vectors of fused multiply-adds (FMA), emitted as LLVM instructions.

The right matrix is in panels (a packed layout) and consists of lines. A line has a word for each of
`PANEL` columns: an input in float32, or two in bfloat16, which are widened in registers. The sums
of a tile of rows and columns stay in registers while the loop runs over lines. Every sum adds its
inputs in order, so it does not depend on other rows. The right matrix is processed in blocks that
stay in the L1 cache for all rows, while the next block is prefetched.

Measured on a Xeon of family 6, model 207, single thread, all weights of SmolLM2-135M's layers in
turn, in milliseconds: `functional.linear` in float32, then panels in float32 and bfloat16. With
AVX2 alone, for torch, too: 1 row 32, 29, 16; 4 rows 57, 33, 23; 16 rows 88, 52, 57; 64 rows 205,
200, 216; 256 rows 729, 708, 871. With 512 bits, torch's product of small matrices in float32
(`brgemm`) does 60 to 160 GFLOP/s with 7 to 1,024 rows of 576 values, vectors do 75 to 157.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload, register_jitable

from services.worker.engine.memory.panels import PANEL, WORD_BYTES
from services.worker.engine.model.cpu_kernels.compiler import (
    CACHE_LINE_BYTES,
    VECTOR_FLOATS,
    WIDE_FLOATS,
    compiled,
    fetch,
    float32_of,
)

COLUMNS = PANEL
"""Maximum columns of a product, and the words per line of the right matrix."""
MOST_ROWS = 6
"""Maximum rows per tile: the sums of more rows do not fit into the registers beside a line."""
_LINES = 64
"""Lines per block of the right matrix: 16 KiB."""
_FLOAT_BYTES = 4
_LINE_FLOATS = CACHE_LINE_BYTES // _FLOAT_BYTES
_LONG, _FLOAT, _WORD = ir.IntType(64), ir.FloatType(), ir.IntType(32)
_FLOATS, _BYTES = _FLOAT.as_pointer(), ir.IntType(8).as_pointer()
_VECTOR = ir.VectorType(_FLOAT, VECTOR_FLOATS)
_WORDS = ir.VectorType(_WORD, VECTOR_FLOATS)


@register_jitable
def tile_columns(rows: int) -> int:
    """Columns of a tile with `rows` rows: at least two vectors, and a divisor of `COLUMNS`."""
    if VECTOR_FLOATS == WIDE_FLOATS or rows == 1:
        return COLUMNS
    return COLUMNS // 2 if rows == 2 else COLUMNS // 4


@intrinsic(prefer_literal=True)
def _tile(
    typing_context: Any, rows: Any, lines: Any, left: Any, stride: Any, right: Any, begun: Any,
    sums: Any, sum_stride: Any, add: Any, ahead: Any, step: Any, stored: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Compute a tile of a product: `rows` (compile-time constant) × `tile_columns(rows)`.

    `left`, `right` and `sums` are addresses: of rows in float32, of lines in the dtype `stored`,
    and of the output, which is added to if `add`. Strides count float32. `begun`: the address of
    partial sums of earlier lines, in rows of `COLUMNS`, or 0. The tile prefetches from address
    `ahead` on, every `step` bytes.
    """
    signature = types.void(rows, *(10 * [types.int64]), stored)
    return signature, _TileLoop(rows.literal_value, in_pairs=stored.dtype == types.uint16)


class _TileLoop:
    """Emits the loop of a `_tile` call."""

    def __init__(self, rows: int, *, in_pairs: bool) -> None:
        self._rows, self._in_pairs = range(rows), in_pairs
        self._vectors = range(tile_columns(rows) // VECTOR_FLOATS)

    def __call__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        _, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, _ = arguments
        rows = [_row(builder, left, stride, n) for n in self._rows]
        # Hide how the addresses were computed. Otherwise the compiler recomputes them in each loop
        # iteration and needs more registers than there are.
        rows = [_opaque(builder, row) for row in rows]
        # Accumulators [row][vector]; LLVM promotes these stack slots to registers.
        totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in self._vectors] for _ in rows]
        self._begin(builder, begun, totals)
        first = builder.inttoptr(right, _FLOATS)
        fetched = cgutils.alloca_once_value(builder, builder.inttoptr(ahead, _BYTES))
        with cgutils.for_range(builder, lines) as loop:
            # Prefetch the next block at the rate at which this block is read.
            for _ in range(0, len(self._vectors) * VECTOR_FLOATS, _LINE_FLOATS):
                place = builder.load(fetched)
                fetch(builder, place)
                builder.store(builder.gep(place, [step]), fetched)
            line = builder.gep(first, [builder.mul(loop.index, _LONG(COLUMNS))])
            self._add_line(builder, loop.index, rows, line, totals)
        adds = _is_set(builder, add)
        for n, row_totals in enumerate(totals):
            target = _row(builder, sums, sum_stride, n)
            for vector, total in enumerate(row_totals):
                place = _vector_at(builder, target, vector)
                with builder.if_then(adds):
                    before = builder.load(place, align=_FLOAT_BYTES)
                    builder.store(builder.fadd(before, builder.load(total)), total)
                builder.store(builder.load(total), place, align=_FLOAT_BYTES)
        return context.get_dummy_value()

    def _begin(self, builder: Any, begun: Any, totals: Sequence[Sequence[Any]]) -> None:
        for n, row_totals in enumerate(totals):
            for vector, total in enumerate(row_totals):
                builder.store(ir.Constant(_VECTOR, None), total)
                with builder.if_then(_is_set(builder, begun)):
                    place = _vector_at(builder, _row(builder, begun, _LONG(COLUMNS), n), vector)
                    builder.store(builder.load(place, align=_FLOAT_BYTES), total)

    def _add_line(self, builder: Any, index: Any, rows: Any, line: Any, totals: Any) -> None:
        """Add the products of a line of the right matrix, which has a single input or two."""
        loaded = [
            builder.load(_vector_at(builder, line, vector), align=_FLOAT_BYTES)
            for vector in self._vectors
        ]
        if not self._in_pairs:
            _add_input(builder, index, rows, loaded, totals)
            return
        # A word holds two bfloat16 inputs; shifting and masking widens each to float32.
        pairs = [builder.bitcast(vector, _WORDS) for vector in loaded]
        shift, mask = (ir.Constant(_WORDS, [each] * VECTOR_FLOATS) for each in (16, 0xFFFF0000))
        lower = [builder.bitcast(builder.shl(pair, shift), _VECTOR) for pair in pairs]
        upper = [builder.bitcast(builder.and_(pair, mask), _VECTOR) for pair in pairs]
        first = builder.mul(index, _LONG(2))
        _add_input(builder, first, rows, lower, totals)
        _add_input(builder, builder.add(first, _LONG(1)), rows, upper, totals)


def _add_input(builder: Any, index: Any, rows: Any, factors: Any, totals: Any) -> None:
    """Add the products of an input to `totals` [row][vector]."""
    for row, row_totals in zip(rows, totals, strict=True):
        each = _repeated(builder, builder.load(builder.gep(row, [index])))
        for factor, total in zip(factors, row_totals, strict=True):
            builder.store(_fused(builder, each, factor, builder.load(total)), total)


def _is_set(builder: Any, number: Any) -> Any:
    return builder.icmp_signed("!=", number, _LONG(0))


def _row(builder: Any, address: Any, stride: Any, row: int) -> Any:
    """Return a pointer to row `row` of a matrix at an address; the stride counts float32."""
    offset = builder.mul(stride, _LONG(row * _FLOAT_BYTES))
    return builder.inttoptr(builder.add(address, offset), _FLOATS)


def _vector_at(builder: Any, line: Any, vector: int) -> Any:
    place = builder.gep(line, [_LONG(vector * VECTOR_FLOATS)])
    return builder.bitcast(place, _VECTOR.as_pointer())


def _opaque(builder: Any, pointer: Any) -> Any:
    """Pass a pointer through empty inline assembly, which hides its origin from the compiler."""
    kind = ir.FunctionType(pointer.type, [pointer.type])
    return builder.asm(kind, "", "=r,0", [pointer], False)


def _fused(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Emit `left` · `right` + `total` as an FMA, so that the compiler cannot reorder the sums."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_VECTOR, 3 * [_VECTOR]),
        f"llvm.fma.v{VECTOR_FLOATS}f32",
    )
    return builder.call(function, [left, right, total])


def _repeated(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, number, _WORD(0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_WORDS, [0] * VECTOR_FLOATS))


@register_jitable
def _tiles(rows, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored):  # type: ignore[no-untyped-def]
    """Call `_tile`, which needs a compile-time constant, with a number of rows."""
    if rows == 1:
        _tile(1, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored)
    elif rows == 2:
        _tile(2, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored)
    elif rows == 3:
        _tile(3, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored)
    elif rows == 4:
        _tile(4, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored)
    elif rows == 5:
        _tile(5, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored)
    else:
        _tile(6, lines, left, stride, right, begun, sums, sum_stride, add, ahead, step, stored)


def _widened(left, at, stride, count, inputs, scratch):  # type: ignore[no-untyped-def]
    """Return (address, stride) of `count` rows of `left` as float32.

    bfloat16 rows are widened to `scratch` [MOST_ROWS, inputs of a block], `inputs` of each row.
    """


@overload(_widened)
def _choose_widened(left, at, stride, count, inputs, scratch):  # type: ignore[no-untyped-def]
    def as_they_are(left, at, stride, count, inputs, scratch):  # type: ignore[no-untyped-def]
        return left.ctypes.data + at * _FLOAT_BYTES, stride

    def widened(left, at, stride, count, inputs, scratch):  # type: ignore[no-untyped-def]
        for m in range(count):
            begin, target = at + m * stride, scratch[m]
            row = left[begin : begin + inputs]
            for k in range(inputs):
                target[k] = float32_of(row[k])
        return scratch.ctypes.data, scratch.shape[1]

    return as_they_are if left.dtype == types.float32 else widened


@register_jitable
def _store_edge(totals, begin, end, sums, sums_at, sum_stride, add):  # type: ignore[no-untyped-def]
    """Write columns `begin` to before `end` of `totals` to `sums`: a tile at the right edge."""
    for m in range(len(totals)):
        for n in range(begin, end):
            place = sums_at + m * sum_stride + n
            sums[place] = totals[m, n] + (sums[place] if add else np.float32(0))


@compiled(
    "void(int64, int64, int64, int64, int64, int64, STORED[::1], int64, int64, int64, float32[::1],"
    " int64)"
)
def multiply(  # type: ignore[no-untyped-def]
    rows, columns, depth, left_stride, sum_stride, add, left, left_at, right, right_end, sums,
    sums_at,
):  # fmt: skip
    """As `small_product.product`, but `right` is an address; its matrix ends at `right_end`."""
    per_word = WORD_BYTES // left.itemsize
    lines, line_bytes = depth // per_word, COLUMNS * WORD_BYTES
    blocks, groups = -(-lines // _LINES), -(-rows // MOST_ROWS)
    # `totals` holds the partial sums between blocks; the last block writes to `sums`.
    totals = np.empty((rows, COLUMNS), np.float32)
    scratch = np.empty((MOST_ROWS, _LINES * per_word), np.float32)
    for block in range(blocks):
        is_last = block == blocks - 1
        size = min(_LINES, lines - block * _LINES)
        following = right + size * line_bytes
        # All groups of rows together prefetch the next block once, if there is one.
        step = -(-CACHE_LINE_BYTES // groups) if following < right_end else 0
        for group in range(groups):
            first = group * MOST_ROWS
            count = min(MOST_ROWS, rows - first)
            at = left_at + first * left_stride + block * _LINES * per_word
            wide, stride = _widened(left, at, left_stride, count, size * per_word, scratch)
            target_at = sums_at + first * sum_stride
            width = tile_columns(count)
            for column in range(0, columns, width):
                offset = column * WORD_BYTES
                into, into_stride, adds = totals[first:].ctypes.data + offset, COLUMNS, 0
                begun = into if block else 0
                # A tile that exceeds the output writes to `totals`; its columns are copied later.
                is_whole = column + width <= columns
                if is_last and is_whole:
                    into = sums.ctypes.data + target_at * _FLOAT_BYTES + offset
                    into_stride, adds = sum_stride, add
                # Each tile prefetches its share of the next block.
                part = (group * COLUMNS + column) // _LINE_FLOATS
                _tiles(
                    count, size, wide, stride, right + offset, begun, into, into_stride, adds,
                    following + part * _LINES * step, step, left.dtype,
                )  # fmt: skip
                if is_last and not is_whole:
                    tile = totals[first : first + count]
                    _store_edge(tile, column, columns, sums, target_at, sum_stride, add)
        right = following
