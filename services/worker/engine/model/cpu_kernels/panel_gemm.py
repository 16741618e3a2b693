"""Products with weights that lie in panels, at the speed of the processor's matrix instructions.

torch exports the product that its own kernels are made of (`at::native::cpublas::brgemm`, oneDNN's
batch-reduce product). It takes weights as they lie in `memory/panels.py`, so a product reads a
weight once, in order, and no library copies it into a layout of its own first.

Measured on Zen 4, one thread, weights of 576 x 1536, as shares of the time of `functional.linear`
in float32: 4 / 16 / 64 / 256 rows take 0.10 / 0.25 / 0.37 / 0.42 in bfloat16.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types, uint16, uint32
from numba.core import cgutils
from numba.core.codegen import get_host_cpu_features
from numba.extending import intrinsic

from services.worker.engine.memory.panels import PAIR, PANEL, panels_of
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
    float32_bits,
    stored_array,
)

_STEP_ROWS = 64
"""Rows of one call: what is read again for each panel stays in the first cache."""
_SYMBOLS = (
    "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
    "_ZN2at6native7cpublas14brgemm_releaseEb",
)
_FEATURES = ("+avx512bf16", "+amx-bf16")
"""Instructions without which oneDNN has no such product, and ends the process."""
_LONG = ir.IntType(64)


@cache
def panel_calls() -> np.ndarray | None:
    """Where the product in bfloat16 is, and what ends its use of matrix registers (int64 [2]).

    None if processor or torch have none that is right.
    """
    if not any(feature in get_host_cpu_features().split(",") for feature in _FEATURES):
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = [getattr(ctypes.CDLL(str(library)), symbol) for symbol in _SYMBOLS]
    except (OSError, AttributeError):
        return None
    calls = np.array([ctypes.cast(one, ctypes.c_void_p).value for one in found], np.int64)
    return calls if _is_right(calls) else None


@intrinsic
def _panel_product(
    typing_context: Any, address: Any, rows: Any, first: Any, count: Any, panels: Any, panel: Any,
    output: Any, add: Any,
) -> tuple[Any, Callable[..., Any]]:  # fmt: skip
    """`count` rows from `first` on times one panel, into the panel's columns of `output`."""
    integer = types.int64
    signature = types.void(integer, rows, integer, integer, panels, integer, output, integer)

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        address, rows, first, count, panels, panel, output, add = (
            context.make_array(kind)(context, builder, argument)
            if isinstance(kind, types.Array)
            else argument
            for kind, argument in zip(signature.args, arguments, strict=True)
        )

        def at(array: Any, offset: Any) -> Any:
            return builder.ptrtoint(cgutils.pointer_add(builder, array.data, offset), _LONG)

        inputs = builder.extract_value(rows.shape, 1)
        outputs = builder.extract_value(output.shape, 1)
        column_bytes = builder.mul(panel, _LONG(PANEL * 4))
        row_bytes = builder.extract_value(rows.strides, 0)
        target = builder.mul(first, builder.extract_value(output.strides, 0))
        # Every argument has a place of eight bytes, also a bool.
        function = ir.FunctionType(ir.VoidType(), [_LONG] * 11).as_pointer()
        builder.call(
            builder.inttoptr(address, function),
            [
                count, _LONG(PANEL), inputs, inputs, _LONG(PANEL), outputs, add,
                at(rows, builder.mul(first, row_bytes)),
                at(panels, builder.mul(panel, builder.extract_value(panels.strides, 0))),
                at(output, builder.add(target, column_bytes)),
                _LONG(1),
            ],
        )  # fmt: skip
        return context.get_dummy_value()

    return signature, generate


@compiled("uint16(float32)")
def bfloat16_bits(number):  # type: ignore[no-untyped-def]
    """The bits of the nearest bfloat16; of two as near, the even one."""
    bits = float32_bits(number)
    if number != number:
        return uint16(0x7FC0)
    return uint16((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))


@compiled("void(float32[:, ::1], uint16[:, ::1])")
def round_rows(rows, rounded):  # type: ignore[no-untyped-def]
    """`rounded` [rows, in] has the bits of bfloat16."""
    for m in range(len(rows)):
        row, target = rows[m], rounded[m]
        for k in range(len(row)):
            target[k] = bfloat16_bits(row[k])


@intrinsic
def _release(typing_context: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
    """Leave matrix registers (AMX) as other code expects them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Sequence[Any]) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_LONG]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], function), [_LONG(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@compiled("void(int64[::1], uint16[:, ::1], uint16[:, :, :, ::1], float32[:, ::1], int64)")
def multiply_panels(calls, rows, panels, output, add):  # type: ignore[no-untyped-def]
    """`output` [rows, out] = `rows` [rows, in] times a weight in panels; plus itself if `add`.

    `calls` are those of `panel_calls`.
    """
    for panel in range(len(panels)):
        for first in range(0, len(rows), _STEP_ROWS):
            count = min(_STEP_ROWS, len(rows) - first)
            _panel_product(calls[0], rows, first, count, panels, panel, output, add)
    _release(calls[1])


class PanelProduct:
    """A weight [out, in] in bfloat16 whose panels lie in host memory, contiguous."""

    rows_max = None

    def __init__(self, panels: torch.Tensor, calls: np.ndarray | None = None) -> None:
        """`calls` None: those of this processor, which has some."""
        self._panels = stored_array(panels)
        self._calls = panel_calls() if calls is None else calls
        assert self._calls is not None, "weights lie in panels only where there is a product"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] in float32, which is rounded to bfloat16 → [rows, out] in float32.

        Raises ValueError for another `in`.
        """
        panels, pairs, _, _ = self._panels.shape
        # The kernel does not check bounds.
        if rows.shape[1] != pairs * PAIR:
            raise ValueError(f"rows {tuple(rows.shape)} do not fit panels {self._panels.shape}")
        output = torch.empty(len(rows), panels * PANEL)
        rounded = np.empty(rows.shape, np.uint16)
        round_rows(rows.contiguous().numpy(), rounded)
        multiply_panels(self._calls, rounded, self._panels, output.numpy(), 0)
        return output


def _is_right(calls: np.ndarray) -> bool:
    """Try the product, with numbers that bfloat16 has exactly."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-8, 8, (_STEP_ROWS + 3, 96), generator=generator).float()
    weight = torch.randint(-8, 8, (2 * PANEL, 96), generator=generator).float()
    panels = panels_of(weight.bfloat16()).contiguous()
    return torch.equal(PanelProduct(panels, calls)(rows), rows @ weight.t())
