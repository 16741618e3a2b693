"""The inner loop of `skinny_gemm`, emitted as LLVM instructions, so that sums stay in registers.

A vector holds `PART` = 4 consecutive inputs of each of several rows, a *team*. Four weights are
loaded once, repeated across a vector, and multiplied by every team. A sum consists of four partial
sums, which the caller adds.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS, fetch

PART = 4
"""Inputs of a row in a vector."""
TEAM = VECTOR_FLOATS // PART
"""Rows that share a vector."""
BLOCK = 16
"""Inputs per loop iteration and prefetch: a cache line of float32."""

_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, VECTOR_FLOATS)
_REPEATED = ir.Constant(
    ir.VectorType(_WORD, VECTOR_FLOATS), [lane % PART for lane in range(VECTOR_FLOATS)]
)


@intrinsic(prefer_literal=True)
def tile_product(
    typing_context: Any, teams: Any, height: Any, inputs: Any, first: Any, weight: Any, n: Any,
    sums: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """Multiply `teams` teams by `height` weight rows; writes `sums`.

    `sums` is [height × teams, VECTOR_FLOATS]. `inputs` [team, blocks × BLOCK / PART, VECTOR_FLOATS]
    are read from team `first` on, `weight` [out, in] in float32 or bfloat16 bits from row `n` on.
    `teams` and `height` are compile-time constants. Ignores the inputs after the last whole block.
    """
    signature = types.void(teams, height, inputs, types.int64, weight, types.int64, sums)
    return signature, _Loop(teams.literal_value, height.literal_value)


class _Loop:
    """Emits the loop of a `tile_product` call."""

    def __init__(self, teams: int, height: int) -> None:
        self._teams, self._height = range(teams), range(height)

    def __call__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        _, _, inputs, first, weight, n, sums = (
            context.make_array(kind)(context, builder, argument)
            if isinstance(kind, types.Array)
            else argument
            for kind, argument in zip(signature.args, arguments, strict=True)
        )
        size = builder.extract_value(weight.shape, 1)
        last = builder.sub(builder.extract_value(weight.shape, 0), _LONG(1))
        vectors = [_row(builder, inputs, builder.add(first, _LONG(team))) for team in self._teams]
        rows, next_rows = [], []
        # After the end of the weight, repeat the last row; the caller ignores these sums.
        for index in self._height:
            row = builder.add(n, _LONG(index))
            beyond = builder.icmp_signed(">", row, last)
            rows.append(_row(builder, weight, builder.select(beyond, last, row)))
            next_rows.append(_row(builder, weight, builder.add(row, _LONG(len(self._height)))))
        # Accumulators [height][team]; LLVM promotes these stack slots to registers.
        totals = [
            [cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, None)) for _ in self._teams]
            for _ in self._height
        ]
        with cgutils.for_range(builder, builder.sdiv(size, _LONG(BLOCK))) as loop:
            begin = builder.mul(loop.index, _LONG(BLOCK))
            # Prefetch the rows of the next step; a prefetch after the end has no effect.
            for row in next_rows:
                fetch(builder, builder.gep(row, [begin]))
            self._multiply_block(builder, vectors, rows, begin, totals)
        target = builder.bitcast(sums.data, _VECTOR.as_pointer())
        for index, total in enumerate(total for row_totals in totals for total in row_totals):
            _store(builder, builder.load(total), builder.gep(target, [_LONG(index)]))
        return context.get_dummy_value()

    def _multiply_block(
        self, builder: Any, vectors: Any, rows: Any, begin: Any, totals: Sequence[Sequence[Any]]
    ) -> None:
        """Add the products of `BLOCK` inputs from `begin` on to `totals` [height][team]."""
        for offset in range(0, BLOCK, PART):
            at = builder.add(begin, _LONG(offset))
            inputs = [
                _load(builder, builder.gep(vector, [builder.mul(at, _LONG(TEAM))]), _VECTOR)
                for vector in vectors
            ]
            for row, row_totals in zip(rows, totals, strict=True):
                weights = _weights(builder, builder.gep(row, [at]))  # used by every team
                for factor, total in zip(inputs, row_totals, strict=True):
                    product = builder.fmul(weights, factor, flags=("contract",))
                    total_now = builder.fadd(builder.load(total), product, flags=("contract",))
                    builder.store(total_now, total)


def _row(builder: Any, array: Any, index: Any) -> Any:
    """Return a pointer to row `index` of an array in C order."""
    stride = builder.extract_value(array.strides, 0)
    return cgutils.pointer_add(builder, array.data, builder.mul(index, stride))


def _weights(builder: Any, address: Any) -> Any:
    """Load `PART` weights as float32 and repeat them for each row of a team."""
    stored = address.type.pointee
    part = _load(builder, address, ir.VectorType(stored, PART))
    if stored != _FLOAT:
        # bfloat16 is the upper half of a float32.
        bits = ir.VectorType(_WORD, PART)
        shifted = builder.shl(builder.zext(part, bits), ir.Constant(bits, [16] * PART))
        part = builder.bitcast(shifted, ir.VectorType(_FLOAT, PART))
    return builder.shuffle_vector(part, ir.Constant(part.type, ir.Undefined), _REPEATED)


def _load(builder: Any, address: Any, vector: Any) -> Any:
    """Load a vector from memory that may only be aligned for its elements."""
    size = vector.element.width // 8 if isinstance(vector.element, ir.IntType) else 4
    return builder.load(builder.bitcast(address, vector.as_pointer()), align=size)


def _store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, address, align=4)
