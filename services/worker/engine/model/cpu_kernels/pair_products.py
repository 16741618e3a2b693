"""Dot products of decode attention in bfloat16, as LLVM instructions.

The processor multiplies pairs of bfloat16 values and adds both products to a float32
(avx512_bf16). Sixteen keys are scored at a time, so that their sums over lanes share additions;
values of two positions are interleaved in registers, as such pairs need it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.worker.engine.model.cpu_kernels.compiler import assembly

LANES = 16
"""Positions that are scored at once."""
PAIRED = 2 * LANES
"""Values of a row in one vector."""
_LONG, _WORD = ir.IntType(64), ir.IntType(32)
_SUMS = ir.VectorType(ir.FloatType(), LANES)
_WORDS = ir.VectorType(_WORD, LANES)
_HALVES = ir.VectorType(ir.IntType(16), PAIRED)


_ROUNDED = f"""
define <{LANES} x bfloat> @rounded(<{LANES} x float> %sums) {{
  %pairs = fptrunc <{LANES} x float> %sums to <{LANES} x bfloat>
  ret <{LANES} x bfloat> %pairs
}}
"""


@cache
def has_pair_products() -> bool:
    """Whether LLVM has the instruction for this processor, in vectors of `LANES` float32.

    What the processor says of itself is not enough: LLVM takes an instruction away together with
    any that it builds on, and it ends the process where it must compile one that it lacks. So the
    rounding that belongs to the same extension is compiled, which it can always do.
    """
    return any("vcvtneps2bf16" in line and "zmm" in line for line in assembly(_ROUNDED))


class _BFloat16(ir.Type):
    """The type of LLVM that llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), PAIRED)


def _add_products(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """`total` plus the products of two vectors of pairs."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(_SUMS, [_SUMS, _PAIRS, _PAIRS]),
        "llvm.x86.avx512bf16.dpbf16ps.512",
    )
    pairs = [builder.bitcast(one, _PAIRS) for one in (left, right)]
    return builder.call(function, [total, *pairs])


def _shuffled(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes))
    return builder.shuffle_vector(left, right, mask)


def _lane_sums(builder: Any, vectors: Sequence[Any]) -> Any:
    """A vector whose lane i is the sum of all lanes of vector i; there are `LANES` of each."""
    width = 1
    while len(vectors) > 1:
        # Groups of `width` lanes: every first one of both vectors, and every second one.
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


def _made(context: Any, builder: Any, signature: Any, arguments: Sequence[Any], index: int) -> Any:
    return context.make_array(signature.args[index])(context, builder, arguments[index])


def _element(builder: Any, array: Any, *indices: Any) -> Any:
    """The address of an element, as a pointer to bytes."""
    offset = _LONG(0)
    for dimension, index in enumerate(indices):
        stride = builder.extract_value(array.strides, dimension)
        offset = builder.add(offset, builder.mul(stride, index))
    return cgutils.pointer_add(builder, array.data, offset, ir.IntType(8).as_pointer())


def _load(builder: Any, address: Any, offset: Any, kind: Any) -> Any:
    place = builder.gep(address, [offset])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=2)


@intrinsic
def score_keys(
    typing_context: Any, wanted: Any, head: Any, keys: Any, slot: Any, kv_head: Any, scores: Any,
    position: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """`scores` [head, position ..] of the `LANES` keys from `slot` on for one head.

    `wanted` [head, head_dim] and `keys` [slot, kv_head, head_dim] have the bits of bfloat16;
    head_dim is a multiple of `PAIRED`.
    """
    integer = types.int64
    signature = types.void(wanted, integer, keys, integer, integer, scores, integer)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        _, head, _, slot, kv_head, _, position = arguments
        rows, stored, target = (
            _made(context, builder, signature, arguments, index) for index in (0, 2, 5)
        )
        query = _element(builder, rows, head)
        first = _element(builder, stored, slot, kv_head)
        stride = builder.extract_value(stored.strides, 0)
        starts = [builder.gep(first, [builder.mul(stride, _LONG(lane))]) for lane in range(LANES)]
        zero = ir.Constant(_SUMS, None)
        totals = [cgutils.alloca_once(builder, _SUMS) for _ in starts]
        for total in totals:
            builder.store(zero, total)
        vectors = builder.sdiv(builder.extract_value(rows.shape, 1), _LONG(PAIRED))
        with cgutils.for_range(builder, vectors) as loop:
            offset = builder.mul(loop.index, _LONG(2 * PAIRED))
            factor = _load(builder, query, offset, _WORDS)
            for start, total in zip(starts, totals, strict=True):
                key = _load(builder, start, offset, _WORDS)
                builder.store(_add_products(builder, builder.load(total), factor, key), total)
        sums = _lane_sums(builder, [builder.load(total) for total in totals])
        place = _element(builder, target, head, position)
        builder.store(sums, builder.bitcast(place, _SUMS.as_pointer()), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def collect_values(
    typing_context: Any, weights: Any, position: Any, values: Any, slot: Any, kv_head: Any,
    attended: Any, first_head: Any, last_head: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Add the `LANES` values from `slot` on, times `weights` [head, position ..], to `attended`.

    `values` [slot, kv_head, head_dim] and `weights` have the bits of bfloat16; `attended` [head,
    head_dim] is float32, and its rows from `first_head` to `last_head` are those that share
    `kv_head`.
    """
    integer = types.int64
    signature = types.void(weights, integer, values, integer, integer, attended, integer, integer)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        _, position, _, slot, kv_head, _, first_head, last_head = arguments
        factors, stored, target = (
            _made(context, builder, signature, arguments, index) for index in (0, 2, 5)
        )
        first = _element(builder, stored, slot, kv_head)
        stride = builder.extract_value(stored.strides, 0)
        vectors = builder.sdiv(builder.extract_value(target.shape, 1), _LONG(PAIRED))
        with cgutils.for_range(builder, vectors) as loop:
            offset = builder.mul(loop.index, _LONG(2 * PAIRED))
            rows = [
                _load(builder, builder.gep(first, [builder.mul(stride, _LONG(n))]), offset, _HALVES)
                for n in range(LANES)
            ]
            pairs = [_interleaved(builder, *rows[n : n + 2]) for n in range(0, LANES, 2)]
            with cgutils.for_range_slice(builder, first_head, last_head, _LONG(1)) as (head, _):
                weight = _element(builder, factors, head, position)
                row = _element(builder, target, head)
                at = builder.mul(offset, _LONG(2))  # float32 has twice the bytes
                for half in range(2):
                    place = builder.gep(row, [builder.add(at, _LONG(half * 4 * LANES))])
                    sums = builder.bitcast(place, _SUMS.as_pointer())
                    total = builder.load(sums, align=4)
                    for n, pair in enumerate(pairs):
                        both = _load(builder, weight, _LONG(4 * n), _WORD)
                        total = _add_products(builder, total, _splat(builder, both), pair[half])
                    builder.store(total, sums, align=4)
        return context.get_dummy_value()

    return signature, generate


def _interleaved(builder: Any, even: Any, odd: Any) -> tuple[Any, Any]:
    """Two rows as pairs of their values: for the first half of their columns, and the second."""
    halves = (range(LANES), range(LANES, PAIRED))
    lower, upper = (
        _shuffled(builder, even, odd, [lane for k in half for lane in (k, k + PAIRED)])
        for half in halves
    )
    return lower, upper


def _splat(builder: Any, word: Any) -> Any:
    undefined = ir.Constant(_WORDS, ir.Undefined)
    one = builder.insert_element(undefined, word, _WORD(0))
    return _shuffled(builder, one, undefined, [0] * LANES)
