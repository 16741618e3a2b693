"""Products with weights that lie in panels, at the speed of the processor's matrix instructions.

torch exports the product that its own kernels are made of (`at::native::cpublas::brgemm`, oneDNN's
batch-reduce product). It takes weights as they lie in `memory/panels.py`, so a product reads a
weight once, in order, and no library copies it into a layout of its own first.

Measured on Zen 4, one thread, weights of 576 x 1536, as shares of the time of `functional.linear`
in float32: 4 / 16 / 64 / 256 rows take 0.12 / 0.26 / 0.37 / 0.37 in bfloat16.
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
_SYMBOL = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_FEATURES = ("+avx512bf16", "+amx-bf16")
"""Instructions without which oneDNN has no such product, and ends the process."""
_LONG = ir.IntType(64)


@cache
def product_address() -> int | None:
    """Where the product in bfloat16 is; None if processor or torch have none that is right."""
    if not any(feature in get_host_cpu_features().split(",") for feature in _FEATURES):
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(str(library)), _SYMBOL), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    assert address is not None
    return address if _is_right(address) else None


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


@compiled("void(int64, uint16[:, ::1], uint16[:, :, :, ::1], float32[:, ::1], int64)")
def multiply_panels(address, rows, panels, output, add):  # type: ignore[no-untyped-def]
    """`output` [rows, out] = `rows` [rows, in] times a weight in panels; plus itself if `add`."""
    for panel in range(len(panels)):
        for first in range(0, len(rows), _STEP_ROWS):
            count = min(_STEP_ROWS, len(rows) - first)
            _panel_product(address, rows, first, count, panels, panel, output, add)


class PanelProduct:
    """A weight [out, in] in bfloat16 whose panels lie in host memory, contiguous."""

    rows_max = None

    def __init__(self, panels: torch.Tensor, address: int | None = None) -> None:
        """`address` None: the product of this processor, which has one."""
        self._panels = stored_array(panels)
        self._address = product_address() if address is None else address
        assert self._address is not None, "weights lie in panels only where there is a product"

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
        multiply_panels(self._address, rounded, self._panels, output.numpy(), 0)
        return output


def _is_right(address: int) -> bool:
    """Try the product, with numbers that bfloat16 has exactly."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-8, 8, (_STEP_ROWS + 3, 96), generator=generator).float()
    weight = torch.randint(-8, 8, (2 * PANEL, 96), generator=generator).float()
    panels = panels_of(weight.bfloat16()).contiguous()
    return torch.equal(PanelProduct(panels, address)(rows), rows @ weight.t())
