"""The product of a few rows with panels in float32, as LLVM instructions.

It takes as long as to read the weight, so it fetches ahead; its sums stay in registers. It adds up
in the order of the inputs, as torch's product does, and has the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from services.worker.engine.memory.panels import PANEL
from services.worker.engine.model.cpu_kernels.compiler import fetch

MOST = 6
"""The sums of more rows do not fit into the registers beside a row of the panel."""
_LANES = 16
_AHEAD = 24
"""How many inputs ahead the panel is fetched."""
_LONG, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, _LANES)
_VECTORS = PANEL // _LANES


@intrinsic(prefer_literal=True)
def panel_rows(
    typing_context: Any, count: Any, rows: Any, first: Any, panels: Any, panel: Any, output: Any,
    row: Any, column: Any, add: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """`count` rows from `first` on times a panel, to `output` from `row` and `column` on.

    It is added to what is there if `add`. `rows` [rows, in], `panels` [panel, in, PANEL, 1] and
    `output` are float32. `count` is known at compile time, at most `MOST`.
    """
    integer = types.int64
    signature = types.void(count, rows, integer, panels, integer, output, integer, integer, integer)
    return signature, _PanelLoop(count.literal_value)


class _PanelLoop:
    """Writes the loop of one `panel_rows`."""

    def __init__(self, count: int) -> None:
        self._count = range(count)

    def __call__(self, context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        rows, panels, output = (
            context.make_array(signature.args[at])(context, builder, arguments[at])
            for at in (1, 3, 5)
        )
        _, _, first, _, panel, _, row, column, add = arguments
        inputs = builder.extract_value(rows.shape, 1)
        weights = _at(builder, panels, panel, _LONG(0))
        counted = [_LONG(n) for n in self._count]
        values = [_at(builder, rows, builder.add(first, n), _LONG(0)) for n in counted]
        targets = [_at(builder, output, builder.add(row, n), column) for n in counted]
        sums = [[cgutils.alloca_once(builder, _VECTOR) for _ in range(_VECTORS)] for _ in targets]
        for row_sums in sums:
            for total in row_sums:
                builder.store(ir.Constant(_VECTOR, None), total)
        with cgutils.for_range(builder, inputs) as loop:
            self._add_products(builder, loop.index, weights, values, sums)
        kept = builder.icmp_signed("!=", add, _LONG(0))
        for target, row_sums in zip(targets, sums, strict=True):
            for n, total in enumerate(row_sums):
                place = builder.bitcast(
                    builder.gep(target, [_LONG(n * _LANES)]), _VECTOR.as_pointer()
                )
                made = builder.load(total)
                with builder.if_then(kept):
                    both = builder.fadd(builder.load(place, align=4), made)
                    builder.store(both, total)
                builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    def _add_products(
        self, builder: Any, index: Any, weights: Any, values: Any, sums: Sequence[Sequence[Any]]
    ) -> None:
        """Add the products of one input to `sums` [row][vector]."""
        begin = builder.mul(index, _LONG(PANEL))
        line = builder.gep(weights, [begin])
        factors = []
        for n in range(_VECTORS):
            fetch(builder, builder.gep(line, [_LONG(_AHEAD * PANEL + n * _LANES)]))
            place = builder.gep(line, [_LONG(n * _LANES)])
            factors.append(builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4))
        for value, row_sums in zip(values, sums, strict=True):
            repeated = _repeated(builder, builder.load(builder.gep(value, [index])))
            for factor, total in zip(factors, row_sums, strict=True):
                builder.store(_fused(builder, repeated, factor, builder.load(total)), total)


def _at(builder: Any, array: Any, row: Any, column: Any) -> Any:
    """The address of an element, of the first two dimensions."""
    offset = builder.mul(builder.extract_value(array.strides, 0), row)
    return builder.gep(cgutils.pointer_add(builder, array.data, offset), [column])


def _fused(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """`left` times `right` plus `total`, as one: the compiler cannot change the order of sums."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, 3 * [_VECTOR]), "llvm.fma.v16f32"
    )
    return builder.call(function, [left, right, total])


def _repeated(builder: Any, number: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.IntType(32)(0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), _LANES), [0] * _LANES)
    return builder.shuffle_vector(one, undefined, lanes)


def multiply_few(*arguments):  # type: ignore[no-untyped-def]
    """As `panel_rows`, if the rows are few and float32; returns whether they were."""


@overload(multiply_few)
def _choose(  # type: ignore[no-untyped-def]
    count, rows, first, panels, panel, output, row, column, add
):
    def never(  # type: ignore[no-untyped-def]
        count, rows, first, panels, panel, output, row, column, add
    ):
        return False

    def few(  # type: ignore[no-untyped-def]
        count, rows, first, panels, panel, output, row, column, add
    ):
        if count > MOST:
            return False
        if count == 1:
            panel_rows(1, rows, first, panels, panel, output, row, column, add)
        elif count == 2:
            panel_rows(2, rows, first, panels, panel, output, row, column, add)
        elif count == 3:
            panel_rows(3, rows, first, panels, panel, output, row, column, add)
        elif count == 4:
            panel_rows(4, rows, first, panels, panel, output, row, column, add)
        elif count == 5:
            panel_rows(5, rows, first, panels, panel, output, row, column, add)
        else:
            panel_rows(6, rows, first, panels, panel, output, row, column, add)
        return True

    return few if rows.dtype == types.float32 else never
