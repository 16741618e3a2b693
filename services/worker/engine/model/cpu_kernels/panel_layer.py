"""The parts of a decoder layer before and after attention, with weights in panels, for any rows.

Rows are rounded to bfloat16 for each product; sums, norms and what is added up stay in float32.
"""

import numpy as np
import torch
from numba import float32

from services.worker.engine.model.cpu_kernels.compiler import compiled, float32_of
from services.worker.engine.model.cpu_kernels.exponential import exponential
from services.worker.engine.model.cpu_kernels.layer_kernel import (
    Arrays,
    LayerKernel,
    LayerWeights,
    add_bias,
)
from services.worker.engine.model.cpu_kernels.panel_gemm import (
    bfloat16_bits,
    multiply_panels,
    panel_calls,
    round_rows,
)
from services.worker.engine.model.cpu_kernels.rms_norm import norm_scale
from services.worker.engine.model.cpu_kernels.rotary import turn

_ROWS, _ROUNDED, _PANELS = "float32[:, ::1]", "uint16[:, ::1]", "uint16[:, :, :, ::1]"
_VECTOR = "uint16[::1]"


@compiled(f"void({_ROWS}, {_VECTOR}, float32, {_ROUNDED})")
def _normalize_rounded(rows, weight, epsilon, output):  # type: ignore[no-untyped-def]
    """The norm of `rms_norm`, rounded."""
    count, size = rows.shape
    for m in range(count):
        row, normed = rows[m], output[m]
        scale = norm_scale(row, epsilon)
        for k in range(size):
            normed[k] = bfloat16_bits(row[k] * scale * float32_of(weight[k]))


@compiled(f"void(int64[::1], {_ROUNDED}, {_PANELS}, {_VECTOR}, {_ROWS})")
def _project(calls, rows, panels, bias, output):  # type: ignore[no-untyped-def]
    """A product, plus `bias` [out]; an empty `bias` [0] means none."""
    multiply_panels(calls, rows, panels, output, 0)
    add_bias(bias, output)


@compiled(
    f"void(int64[::1], {_ROWS}, {_ROWS}, {_ROWS}, {_VECTOR}, float32,"
    + 3 * f" {_PANELS}, {_VECTOR},"
    + f" {_VECTOR}, {_VECTOR}, {_ROUNDED}, {_ROWS}, {_ROWS}, {_ROWS})"
)
def _before(  # type: ignore[no-untyped-def]
    calls, hidden, cosine, sine, norm, epsilon, weight_q, bias_q, weight_k, bias_k, weight_v,
    bias_v, norm_q, norm_k, normed, query, key, value,
):  # fmt: skip
    _normalize_rounded(hidden, norm, epsilon, normed)
    _project(calls, normed, weight_q, bias_q, query)
    _project(calls, normed, weight_k, bias_k, key)
    _project(calls, normed, weight_v, bias_v, value)
    turn(query, norm_q, epsilon, cosine, sine)
    turn(key, norm_k, epsilon, cosine, sine)


@compiled(f"void({_ROWS}, {_ROWS}, {_ROUNDED})")
def _gate_rounded(gate, up, output):  # type: ignore[no-untyped-def]
    """SiLU of `gate`, times `up`, rounded."""
    for m in range(len(gate)):
        for k in range(gate.shape[1]):
            wanted = gate[m, k]
            gated = wanted / (float32(1) + exponential(-wanted)) * up[m, k]
            output[m, k] = bfloat16_bits(gated)


@compiled(
    f"void(int64[::1], {_ROWS}, {_ROWS}, {_PANELS}, {_VECTOR}, float32,"
    + 3 * f" {_PANELS},"
    + f" {_ROUNDED}, {_ROUNDED}, {_ROWS}, {_ROWS}, {_ROUNDED}, {_ROWS})"
)
def _after(  # type: ignore[no-untyped-def]
    calls, hidden, attended, weight_o, norm, epsilon, weight_gate, weight_up, weight_down,
    rounded, normed, gate, up, gated, output,
):  # fmt: skip
    round_rows(attended, rounded)
    output[:] = hidden
    multiply_panels(calls, rounded, weight_o, output, 1)
    _normalize_rounded(output, norm, epsilon, normed)
    multiply_panels(calls, normed, weight_gate, gate, 0)
    multiply_panels(calls, normed, weight_up, up, 0)
    _gate_rounded(gate, up, gated)
    multiply_panels(calls, gated, weight_down, output, 1)


class PanelLayerKernel(LayerKernel):
    """With weights in panels, biases and norms in bfloat16; this processor has the product."""

    def __init__(self, weights: LayerWeights, head_dim: int, epsilon: float) -> None:
        super().__init__(weights, head_dim, epsilon)
        self._calls = panel_calls()
        assert self._calls is not None, "weights lie in panels only where there is a product"

    def _run_before(self, hidden: torch.Tensor, rotation: Arrays, outputs: Arrays) -> None:
        normed = np.empty(hidden.shape, np.uint16)
        _before(self._calls, hidden.numpy(), *rotation, *self.weights_before, normed, *outputs)

    def _run_after(
        self, hidden: torch.Tensor, attended: torch.Tensor, gated: Arrays, output: np.ndarray
    ) -> None:
        gate, up = gated
        rounded, normed, product = (
            np.empty(shape, np.uint16) for shape in (attended.shape, hidden.shape, gate.shape)
        )
        _after(
            *(self._calls, hidden.numpy(), attended.numpy(), *self.weights_after),
            *(rounded, normed, gate, up, product, output),
        )
