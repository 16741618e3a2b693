"""A decoder layer with weights in panels (packed): a kernel before attention, another after it.

With bfloat16 weights, rows are rounded to bfloat16 for each product; sums, norms and the residual
stream stay in float32.
"""

import numpy as np
import torch
from numba import float32
from numba.extending import register_jitable

from services.worker.engine.memory.panels import PANEL
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
    float32_of,
    narrow,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.exponential import exponential
from services.worker.engine.model.cpu_kernels.layer_kernel import (
    Arrays,
    LayerKernel,
    LayerWeights,
    add_bias,
)
from services.worker.engine.model.cpu_kernels.panel_gemm import (
    multiply_panel,
    multiply_panels,
    narrow_rows,
    panel_calls,
)
from services.worker.engine.model.cpu_kernels.rms_norm import norm_scale, rotate
from services.worker.engine.model.cpu_kernels.small_product import STEP_ROWS, rows_at_once

_ROWS, _NARROWED, _PANELS = "float32[:, ::1]", "STORED[:, ::1]", "STORED[:, :, :, ::1]"
_VECTOR = "STORED[::1]"


@compiled(f"void({_ROWS}, {_VECTOR}, float32, {_NARROWED})")
def _normalize_narrowed(rows, weight, epsilon, output):  # type: ignore[no-untyped-def]
    """Write the RMSNorm of `rows` times `weight` to `output`, rounded to the storage dtype."""
    count, size = rows.shape
    for m in range(count):
        row, normed = rows[m], output[m]
        scale = norm_scale(row, epsilon)
        for k in range(size):
            normed[k] = narrow(row[k] * scale * float32_of(weight[k]), normed)


@compiled(f"void(int64[::1], {_NARROWED}, {_PANELS}, {_VECTOR}, {_ROWS})")
def _project(calls, rows, panels, bias, output):  # type: ignore[no-untyped-def]
    """Store a product plus `bias` [out] in `output`; an empty `bias` [0] means no bias."""
    multiply_panels(calls, rows, panels, output, 0)
    add_bias(bias, output)


@compiled(
    f"void(int64[::1], {_ROWS}, {_ROWS}, {_ROWS}, {_VECTOR}, float32,"
    + 3 * f" {_PANELS}, {_VECTOR},"
    + f" {_VECTOR}, {_VECTOR}, {_NARROWED}, {_ROWS}, {_ROWS}, {_ROWS})"
)
def before_attention(  # type: ignore[no-untyped-def]
    calls, hidden, cosine, sine, norm, epsilon, weight_q, bias_q, weight_k, bias_k, weight_v,
    bias_v, norm_q, norm_k, normed, query, key, value,
):  # fmt: skip
    # Round the normed rows once for the three projections.
    _normalize_narrowed(hidden, norm, epsilon, normed)
    _project(calls, normed, weight_q, bias_q, query)
    _project(calls, normed, weight_k, bias_k, key)
    _project(calls, normed, weight_v, bias_v, value)
    rotate(query, norm_q, epsilon, cosine, sine)
    rotate(key, norm_k, epsilon, cosine, sine)


@register_jitable
def _gate(gate, up, count, output, column):  # type: ignore[no-untyped-def]
    """Write SiLU(`gate`) · `up` of `count` rows to `output`, from its column `column` on."""
    for m in range(count):
        target = output[m, column : column + PANEL]
        for k in range(PANEL):
            value = gate[m, k]
            gated = value / (float32(1) + exponential(-value)) * up[m, k]
            target[k] = narrow(gated, target)


@compiled(f"void(int64[::1], {_NARROWED}, {_PANELS}, {_PANELS}, {_ROWS}, {_ROWS}, {_NARROWED})")
def _multiply_gated(  # type: ignore[no-untyped-def]
    calls,
    rows,
    weight_gate,
    weight_up,
    gate,
    up,
    output,
):
    """`output` [rows, out] = SiLU(rows · gate weight) · (rows · up weight), rounded for storage.

    `gate` and `up` [STEP_ROWS, PANEL] are scratch.
    """
    # Fuse the steps per panel, so that gate and up values are used while they are in the cache.
    block_rows = rows_at_once(calls[0], rows)
    for begin in range(0, len(rows), block_rows):
        end = min(begin + block_rows, len(rows))
        for panel in range(len(weight_gate)):
            for first in range(begin, end, STEP_ROWS):
                count = min(STEP_ROWS, end - first)
                multiply_panel(calls, count, rows, first, weight_gate, panel, gate, 0, 0, 0)
                multiply_panel(calls, count, rows, first, weight_up, panel, up, 0, 0, 0)
                _gate(gate, up, count, output[first:], panel * PANEL)


@compiled(
    f"void(int64[::1], {_ROWS}, {_PANELS}, {_VECTOR}, float32,"
    + 3 * f" {_PANELS},"
    + f" {_NARROWED}, {_NARROWED}, {_ROWS}, {_ROWS}, {_NARROWED}, {_ROWS})"
)
def after_attention(  # type: ignore[no-untyped-def]
    calls, attended, weight_o, norm, epsilon, weight_gate, weight_up, weight_down,
    narrowed, normed, gate, up, gated, hidden,
):  # fmt: skip
    """Add the updates of attention and of the MLP to the residual stream `hidden`, in place."""
    # Products take rows in the storage dtype; `hidden` stays in float32.
    narrow_rows(attended, narrowed)
    multiply_panels(calls, narrowed, weight_o, hidden, 1)  # 1: adds to the residual stream
    _normalize_narrowed(hidden, norm, epsilon, normed)
    _multiply_gated(calls, normed, weight_gate, weight_up, gate, up, gated)
    multiply_panels(calls, gated, weight_down, hidden, 1)


class PanelLayerKernel(LayerKernel):
    """A layer with weights in panels, for any number of rows."""

    def __init__(self, weights: LayerWeights, head_dim: int, epsilon: float) -> None:
        super().__init__(weights, head_dim, epsilon)
        for kernel in (before_attention, after_attention):
            kernel.load(weights.query.dtype)
        self._calls = panel_calls(weights.query.dtype)
        assert self._calls is not None, "panels are used only if a product supports them"
        self._stored = stored_array(weights.query).dtype

    def _run_before(self, hidden: torch.Tensor, rotation: Arrays, outputs: Arrays) -> None:
        normed = np.empty(hidden.shape, self._stored)
        before_attention(
            self._calls, hidden.numpy(), *rotation, *self.weights_before, normed, *outputs
        )

    def _run_after(self, hidden: torch.Tensor, attended: torch.Tensor, output: np.ndarray) -> None:
        gate, up = (np.empty((STEP_ROWS, PANEL), np.float32) for _ in range(2))
        shapes = (attended.shape, hidden.shape, (len(hidden), self.gated_size))
        narrowed, normed, gated = (np.empty(shape, self._stored) for shape in shapes)
        np.copyto(output, hidden.numpy())  # the kernel adds to the residual stream in place
        after_attention(
            *(self._calls, attended.numpy(), *self.weights_after),
            *(narrowed, normed, gate, up, gated, output),
        )
