"""Kernels of matrix products with weights in panels, the packed layout of `memory/panels.py`.

The micro-kernel (`small_product.py`) reads the packed weight sequentially; a library would first
repack a weight into its own layout.

Measured on Zen 4, single thread, weights of 576 x 1536, as shares of the time of
`functional.linear` in float32: 4 / 16 / 64 / 256 rows take 0.10 / 0.25 / 0.37 / 0.42 in bfloat16.
"""

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
import torch

from services.worker.engine.memory.panels import PANEL, panels_of
from services.worker.engine.model.cpu_kernels import STORED_TYPES
from services.worker.engine.model.cpu_kernels.compiler import (
    VECTOR_FLOATS,
    WIDE_FLOATS,
    compiled,
    narrow,
    processor_features,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.small_product import (
    STEP_ROWS,
    product,
    release,
    rows_at_once,
)

_PRODUCT = "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb"
_RELEASE = "_ZN2at6native7cpublas14brgemm_releaseEb"
_VECTORS = {"+avx512f", "+avx512bw", "+avx512dq", "+avx512vl"}
_NAMES = {"+avx512bf16": "avx512_bf16", "+amx-bf16": "amx_bf16"}
"""Instructions that multiply bfloat16, with their names in /proc/cpuinfo.

oneDNN requires `_VECTORS` and any of these for a bfloat16 brgemm, else it aborts the process.
"""
_FUSED_VECTORS = {"+avx2", "+fma"}
"""Required for the vector product, which was not measured without them."""


@cache
def panel_calls(dtype: torch.dtype) -> np.ndarray | None:
    """Return the addresses that `product` and `release` call for a dtype, int64 [2].

    Zeros select the vector product: for float32, and for bfloat16 if the CPU or torch has no brgemm
    or its test product is wrong. None if the vector product is not usable either.
    """
    if dtype not in STORED_TYPES:
        return None
    candidates = [_torch_calls()] if dtype == torch.bfloat16 else []
    if processor_features() >= _FUSED_VECTORS:
        candidates.append(np.zeros(2, np.int64))
    return next((c for c in candidates if c is not None and _is_correct(c, dtype)), None)


def product_instructions(dtype: torch.dtype) -> list[str]:
    """Return the CPU instructions of the panel product, by their names in /proc/cpuinfo."""
    calls = panel_calls(dtype)
    if calls is None:
        return []
    if not calls[0]:
        return ["avx512f" if VECTOR_FLOATS == WIDE_FLOATS else "avx2"]
    return _matrix_instructions()


def _matrix_instructions() -> list[str]:
    features = processor_features()
    return [name for feature, name in _NAMES.items() if _VECTORS | {feature} <= features]


def _torch_calls() -> np.ndarray | None:
    if not _matrix_instructions():
        return None
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        loaded = ctypes.CDLL(str(library))
        functions = [getattr(loaded, symbol) for symbol in (_PRODUCT, _RELEASE)]
    except (OSError, AttributeError):
        # The symbols are no public interface of torch, so another version may lack them.
        return None
    return np.array([ctypes.cast(f, ctypes.c_void_p).value for f in functions], np.int64)


@compiled("void(float32[:, ::1], STORED[:, ::1])")
def narrow_rows(rows, narrowed):  # type: ignore[no-untyped-def]
    """Copy `rows` [rows, in] to `narrowed`, rounded to the storage dtype."""
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
    """Multiply `count` rows from `first` on by panel `panel` of `panels`.

    Writes to `output` from (`row`, `column`) on, or adds to it if `add`. `calls`: see
    `panel_calls`.
    """
    inputs, outputs = rows.shape[1], output.shape[1]
    product(
        calls[0], count, PANEL, inputs, inputs, outputs, add, rows, first * inputs, panels,
        panel * PANEL * inputs, output, row * outputs + column,
    )  # fmt: skip


@compiled("void(int64[::1], STORED[:, ::1], STORED[:, :, :, ::1], float32[:, ::1], int64)")
def multiply_panels(calls, rows, panels, output, add):  # type: ignore[no-untyped-def]
    """Write `rows` [rows, in] · a weight in panels to `output` [rows, out]; add to it if `add`."""
    # Loop blocking: a block of rows stays in the L2 cache while all panels are read, and a panel
    # stays in a cache for all steps of the block.
    block_rows = rows_at_once(calls[0], rows)
    for begin in range(0, len(rows), block_rows):
        end = min(begin + block_rows, len(rows))
        for panel in range(len(panels)):
            for first in range(begin, end, STEP_ROWS):
                count = min(STEP_ROWS, end - first)
                column = panel * PANEL
                multiply_panel(calls, count, rows, first, panels, panel, output, first, column, add)
    release(calls[1])


class PanelProduct:
    """Multiplies by a weight [out, in] whose panels are contiguous in host memory."""

    rows_max = None

    def __init__(self, panels: torch.Tensor, calls: np.ndarray | None = None) -> None:
        """`calls` None: use `panel_calls`."""
        for kernel in (narrow_rows, multiply_panels):
            kernel.load(panels.dtype)
        self._panels = stored_array(panels)
        self._calls = panel_calls(panels.dtype) if calls is None else calls
        assert self._calls is not None, "panels are used only if a product supports them"

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, in], rounded to the weight's dtype → [rows, out]; both float32.

        Raises ValueError if `in` does not match.
        """
        panels, lines, _, per_word = self._panels.shape
        # Check the shape here, because the kernel does not check bounds.
        if rows.shape[1] != lines * per_word:
            raise ValueError(f"rows {tuple(rows.shape)} do not match panels {self._panels.shape}")
        output = torch.empty(len(rows), panels * PANEL)
        narrowed = np.empty(rows.shape, self._panels.dtype)
        narrow_rows(rows.contiguous().numpy(), narrowed)
        multiply_panels(self._calls, narrowed, self._panels, output.numpy(), 0)
        return output


def _is_correct(calls: np.ndarray, dtype: torch.dtype) -> bool:
    """Whether a test product equals torch's."""
    # Use small integers, which are exact in bfloat16 and whose sums are exact in float32.
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(-8, 8, (STEP_ROWS + 3, 200), generator=generator).float()
    weight = torch.randint(-8, 8, (2 * PANEL, 200), generator=generator).float()
    panels = panels_of(weight.to(dtype)).contiguous()
    return torch.equal(PanelProduct(panels, calls)(rows), rows @ weight.t())
