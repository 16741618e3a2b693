"""Products with weights that lie in panels, at the speed of the processor's matrix instructions.

torch's product (`brgemm.py`) takes weights as they lie in `memory/panels.py`, so it reads a weight
once, in order, and no library copies it into a layout of its own first.

Measured on Zen 4, one thread, weights of 576 x 1536, as shares of the time of `functional.linear`
in float32: 4 / 16 / 64 / 256 rows take 0.10 / 0.25 / 0.37 / 0.42 in bfloat16.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.memory.panels import PANEL, panels_of
from services.worker.engine.model.cpu_kernels.brgemm import product, release
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
    narrow,
    processor_features,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.few_rows import multiply_few

STEP_ROWS = 64
"""Rows of one call: what is read again for each panel stays in the first cache."""
_PRODUCTS = {
    torch.float32: "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb",
    torch.bfloat16: "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb",
}
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
_VECTORS = {"+avx512f", "+avx512bw", "+avx512dq", "+avx512vl"}
_FEATURES = {
    torch.float32: (_VECTORS,),
    torch.bfloat16: (_VECTORS | {"+avx512bf16"}, _VECTORS | {"+amx-bf16"}),
}
"""Instructions, all of one set, without which oneDNN has no such product, and ends the process."""
_NAMES = {"+avx512f": "avx512f", "+avx512bf16": "avx512_bf16", "+amx-bf16": "amx_bf16"}
"""Instructions that multiply, by the names that /proc/cpuinfo has for them."""


@cache
def panel_calls(dtype: torch.dtype) -> np.ndarray | None:
    """The addresses (int64 [2]) of the product of a dtype, and of the call that releases AMX tiles.

    None if the processor lacks the instructions, if torch lacks the product, or if a trial product
    is wrong.
    """
    features = processor_features()
    if not any(needed <= features for needed in _FEATURES.get(dtype, ())):
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        found = [getattr(loaded, symbol) for symbol in (_PRODUCTS[dtype], _RELEASE)]
    except (OSError, AttributeError):
        return None
    calls = np.array([ctypes.cast(one, ctypes.c_void_p).value for one in found], np.int64)
    return calls if _is_right(calls, dtype) else None


def product_instructions(dtype: torch.dtype) -> list[str]:
    """The instructions of this processor that can multiply a dtype, as /proc/cpuinfo names them."""
    features = processor_features()
    usable = [needed for needed in _FEATURES.get(dtype, ()) if needed <= features]
    own = [sorted(needed - _VECTORS) or ["+avx512f"] for needed in usable]
    return [_NAMES[one] for names in own for one in names]


@compiled("void(float32[:, ::1], STORED[:, ::1])")
def narrow_rows(rows, narrowed):  # type: ignore[no-untyped-def]
    """Copy `rows` [rows, in], rounded if weights are stored in bfloat16."""
    for m in range(len(rows)):
        row, target = rows[m], narrowed[m]
        for k in range(len(row)):
            target[k] = narrow(row[k], target)


@compiled(
    "void(int64[::1], int64, STORED[:, ::1], int64, STORED[:, :, :, ::1], int64,"
    " float32[:, ::1], int64, int64, int64)"
)
def multiply_panel(  # type: ignore[no-untyped-def]
    calls, count, rows, first, panels, panel, output, row, column, add
):
    """`count` rows from `first` on times a panel, to `output` from `row` and `column` on.

    It is added to what is there if `add`. `calls` are those of `panel_calls`.
    """
    if multiply_few(count, rows, first, panels, panel, output, row, column, add):
        return
    inputs, outputs = rows.shape[1], output.shape[1]
    product(
        calls[0], count, PANEL, inputs, inputs, PANEL, outputs, add, rows, first * inputs,
        panels, panel * PANEL * inputs, output, row * outputs + column,
    )  # fmt: skip


@compiled("void(int64[::1], STORED[:, ::1], STORED[:, :, :, ::1], float32[:, ::1], int64)")
def multiply_panels(calls, rows, panels, output, add):  # type: ignore[no-untyped-def]
    """`output` [rows, out] = `rows` [rows, in] times a weight in panels; plus itself if `add`."""
    for panel in range(len(panels)):
        for first in range(0, len(rows), STEP_ROWS):
            count = min(STEP_ROWS, len(rows) - first)
            column = panel * PANEL
            multiply_panel(calls, count, rows, first, panels, panel, output, first, column, add)
    release(calls[1])


class PanelProduct:
    """A weight [out, in] whose panels lie in host memory, contiguous."""

    rows_max = None

    def __init__(self, panels: torch.Tensor, calls: np.ndarray | None = None) -> None:
        """`calls` None: those of this processor, which has some."""
        for kernel in (narrow_rows, multiply_panels):
            kernel.load(panels.dtype)
        self._panels = stored_array(panels)
        self._calls = panel_calls(panels.dtype) if calls is None else calls
        assert self._calls is not None, "weights lie in panels only where there is a product"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] in float32, which is rounded as the weight is → [rows, out] in float32.

        Raises ValueError for another `in`.
        """
        panels, words, _, beside = self._panels.shape
        # The kernel does not check bounds.
        if rows.shape[1] != words * beside:
            raise ValueError(f"rows {tuple(rows.shape)} do not fit panels {self._panels.shape}")
        output = torch.empty(len(rows), panels * PANEL)
        narrowed = np.empty(rows.shape, self._panels.dtype)
        narrow_rows(rows.contiguous().numpy(), narrowed)
        multiply_panels(self._calls, narrowed, self._panels, output.numpy(), 0)
        return output


def _is_right(calls: np.ndarray, dtype: torch.dtype) -> bool:
    """Try the product, with numbers that bfloat16 has exactly."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-8, 8, (STEP_ROWS + 3, 96), generator=generator).float()
    weight = torch.randint(-8, 8, (2 * PANEL, 96), generator=generator).float()
    panels = panels_of(weight.to(dtype)).contiguous()
    return torch.equal(PanelProduct(panels, calls)(rows), rows @ weight.t())
