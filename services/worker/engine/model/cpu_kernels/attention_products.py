"""Dot products of decode attention, emitted as LLVM instructions for numba kernels.

`LANES` positions of the context are handled at a time. Horizontal sums of their scores then share
additions; a compiler would reduce each score separately. *Factors* are the values that keys and
values are multiplied by: queries and softmax weights. With avx512_bf16, which multiplies pairs of
bfloat16 values and adds both products to a float32, factors are rounded to bfloat16. Otherwise all
products are in float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.worker.engine.model.cpu_kernels.bfloat16 import BFloat16
from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS
from services.worker.engine.model.cpu_kernels.exponential import vector_call

LANES = VECTOR_FLOATS
"""Positions per call, equal to the float32 lanes of a vector."""
_LONG, _WORD = ir.IntType(64), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(_WORD, LANES)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)
_PAIR_BITS = ir.VectorType(ir.IntType(16), 2 * LANES)
_WORD_BYTES = 4

_PAIRS = ir.VectorType(BFloat16(), 2 * LANES)


class _Pairs:
    """Products of keys or values in bfloat16 and factors in bfloat16, in pairs (vdpbf16ps)."""

    values_per_vector = 2 * LANES
    stored_bytes = factor_bytes = 2

    def load(self, builder: Any, address: Any, offset: Any) -> Any:
        return _load(builder, address, offset, _PAIR_BITS)

    def load_factors(self, builder: Any, address: Any, offset: Any) -> Any:
        return self.load(builder, address, offset)

    def add_product(self, builder: Any, total: Any, left: Any, right: Any) -> Any:
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]),
            "llvm.x86.avx512bf16.dpbf16ps.512",
        )
        return builder.call(function, [total, *(builder.bitcast(o, _PAIRS) for o in (left, right))])

    def columns(self, builder: Any, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Interleave the vectors of every two positions; returns the two halves of each result."""
        # vdpbf16ps sums adjacent products: make values of the same element adjacent.
        halves = (range(LANES), range(LANES, 2 * LANES))
        lanes = [[lane for k in half for lane in (k, k + 2 * LANES)] for half in halves]
        return [
            tuple(_shuffled(builder, rows[n], rows[n + 1], half) for half in lanes)
            for n in range(0, LANES, 2)
        ]


class _Floats:
    """Products of keys or values in float32 and factors in float32."""

    values_per_vector = LANES
    stored_bytes = factor_bytes = 4

    def load(self, builder: Any, address: Any, offset: Any) -> Any:
        return _load(builder, address, offset, _FLOATS)

    def load_factors(self, builder: Any, address: Any, offset: Any) -> Any:
        return _load(builder, address, offset, _FLOATS)

    def add_product(self, builder: Any, total: Any, left: Any, right: Any) -> Any:
        return vector_call(builder, "fma", builder.bitcast(left, _FLOATS), right, total)

    def columns(self, builder: Any, rows: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(row,) for row in rows]


class _Widened(_Floats):
    """Products of keys or values in bfloat16, widened, and factors in float32."""

    stored_bytes = 2

    def load(self, builder: Any, address: Any, offset: Any) -> Any:
        # A bfloat16 is the upper half of a float32.
        bits = builder.zext(_load(builder, address, offset, _SHORTS), _WORDS)
        upper = builder.shl(bits, ir.Constant(_WORDS, [16] * LANES))
        return builder.bitcast(upper, _FLOATS)


def _kind(factors: Any, stored: Any) -> _Pairs | _Floats:
    if factors.dtype == types.uint16:
        return _Pairs()
    return _Widened() if stored.dtype == types.uint16 else _Floats()


@intrinsic
def score_keys(
    typing_context: Any, queries: Any, head: Any, blocks: Any, block: Any, slot: Any, kv_head: Any,
    scores: Any, position: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Store the scores of `LANES` keys, from `slot` of a block on, in `scores` [head, position ..].

    `queries` [head, head_dim] and `blocks` [block, 2, slot, kv_head, head_dim] are float32 or
    bfloat16 bits. Queries may be bfloat16 only if blocks are and `bfloat16.has_pair_products`.
    head_dim is a multiple of `LANES`, or of 2 × `LANES` for pairs.
    """
    integer, kind = types.int64, _kind(queries, blocks)
    signature = types.void(queries, integer, blocks, integer, integer, integer, scores, integer)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        _, head, _, block, slot, kv_head, _, position = arguments
        rows, stored, target = (
            _array_struct(context, builder, signature, arguments, index) for index in (0, 2, 6)
        )
        query = _element(builder, rows, head)
        first = _element(builder, stored, block, _LONG(0), slot, kv_head)  # half 0: keys
        stride = builder.extract_value(stored.strides, 2)
        starts = [builder.gep(first, [builder.mul(stride, _LONG(lane))]) for lane in range(LANES)]
        # Use a vector accumulator per key; LLVM promotes these stack slots to registers.
        totals = [cgutils.alloca_once(builder, _FLOATS) for _ in starts]
        for total in totals:
            builder.store(ir.Constant(_FLOATS, None), total)
        vectors = builder.sdiv(builder.extract_value(rows.shape, 1), _LONG(kind.values_per_vector))
        with cgutils.for_range(builder, vectors) as loop:
            value = builder.mul(loop.index, _LONG(kind.values_per_vector))
            at = builder.mul(value, _LONG(kind.factor_bytes))
            factors = kind.load_factors(builder, query, at)  # shared by all keys
            at = builder.mul(value, _LONG(kind.stored_bytes))
            for start, total in zip(starts, totals, strict=True):
                key = kind.load(builder, start, at)
                sums = kind.add_product(builder, builder.load(total), factors, key)
                builder.store(sums, total)
        sums = _lane_sums(builder, [builder.load(total) for total in totals])
        place = _element(builder, target, head, position)
        builder.store(sums, builder.bitcast(place, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def collect_values(
    typing_context: Any, weights: Any, position: Any, blocks: Any, block: Any, slot: Any,
    kv_head: Any, attended: Any, first_head: Any, last_head: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Add `LANES` values, from `slot` of a block on, times their `weights` to `attended`.

    `weights` [head, position ..] and `blocks` have the types of `queries` and `blocks` of
    `score_keys`; `attended` [head, head_dim] is float32. The query heads from `first_head` to
    before `last_head` share `kv_head`.
    """
    integer, kind = types.int64, _kind(weights, blocks)
    signature = types.void(
        weights, integer, blocks, integer, integer, integer, attended, integer, integer
    )

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        _, position, _, block, slot, kv_head, _, first_head, last_head = arguments
        factors, stored, target = (
            _array_struct(context, builder, signature, arguments, index) for index in (0, 2, 6)
        )
        first = _element(builder, stored, block, _LONG(1), slot, kv_head)  # half 1: values
        stride = builder.extract_value(stored.strides, 2)
        starts = [builder.gep(first, [builder.mul(stride, _LONG(lane))]) for lane in range(LANES)]
        vectors = builder.sdiv(
            builder.extract_value(target.shape, 1), _LONG(kind.values_per_vector)
        )
        with cgutils.for_range(builder, vectors) as loop:
            value = builder.mul(loop.index, _LONG(kind.values_per_vector))
            at = builder.mul(value, _LONG(kind.stored_bytes))
            # Load the values once for all query heads of the KV head (grouped-query attention).
            columns = kind.columns(builder, [kind.load(builder, start, at) for start in starts])
            at = builder.mul(value, _LONG(_WORD_BYTES))
            with cgutils.for_range_slice(builder, first_head, last_head, _LONG(1)) as (head, _):
                weight = _element(builder, factors, head, position)
                row = builder.gep(_element(builder, target, head), [at])
                for part in range(kind.values_per_vector // LANES):
                    place = builder.gep(row, [_LONG(part * LANES * _WORD_BYTES)])
                    sums = builder.bitcast(place, _FLOATS.as_pointer())
                    total = builder.load(sums, align=4)
                    for n, column in enumerate(columns):
                        word = _load(builder, weight, _LONG(n * _WORD_BYTES), _WORD)
                        factor = _splat(builder, word)
                        total = kind.add_product(builder, total, factor, column[part])
                    builder.store(total, sums, align=4)
        return context.get_dummy_value()

    return signature, generate


def _shuffled(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes))
    return builder.shuffle_vector(left, right, mask)


def _lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """Return the horizontal sums of `LANES` vectors: lane i is the sum of vector i."""
    # Each step of this reduction tree halves the number of vectors.
    width = 1
    while len(vectors) > 1:
        # Add the even and the odd groups of `width` lanes of both vectors.
        begins = range(0, LANES, 2 * width)
        first = [at + k for begin in begins for at in (begin, begin + LANES) for k in range(width)]
        second = [lane + width for lane in first]
        vectors = [
            builder.fadd(
                _shuffled(builder, left, right, first), _shuffled(builder, left, right, second)
            )
            for left, right in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width *= 2
    return vectors[0]


def _splat(builder: Any, word: Any) -> Any:
    undefined = ir.Constant(_WORDS, ir.Undefined)
    first = builder.insert_element(undefined, word, _WORD(0))
    return _shuffled(builder, first, undefined, [0] * LANES)


def _array_struct(
    context: Any, builder: Any, signature: Any, arguments: Sequence[Any], index: int
) -> Any:
    return context.make_array(signature.args[index])(context, builder, arguments[index])


def _element(builder: Any, array: Any, *indices: Any) -> Any:
    """Return the address of an element, as a pointer to bytes."""
    offset = _LONG(0)
    for dimension, index in enumerate(indices):
        stride = builder.extract_value(array.strides, dimension)
        offset = builder.add(offset, builder.mul(stride, index))
    return cgutils.pointer_add(builder, array.data, offset, ir.IntType(8).as_pointer())


def _load(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    place = builder.gep(address, [offset])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=2)
