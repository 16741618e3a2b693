"""A decoder layer with row-major weights, for few rows: a kernel before attention, another after.

With few rows, the forty operations of a layer take a few microseconds each, and calling each from
Python would take as long again.
"""

import numpy as np
import torch
from numba import float32

from services.worker.engine.model.cpu_kernels.compiler import compiled
from services.worker.engine.model.cpu_kernels.exponential import exponential
from services.worker.engine.model.cpu_kernels.layer_kernel import (
    Arrays,
    LayerKernel,
    LayerWeights,
    add_bias,
)
from services.worker.engine.model.cpu_kernels.rms_norm import normalize, rotate
from services.worker.engine.model.cpu_kernels.skinny_gemm import (
    FEW_ROWS,
    arrange,
    inputs_buffer,
    multiply,
)

_ROWS, _INPUTS = "float32[:, ::1]", "float32[:, :, ::1]"


@compiled(f"void({_ROWS}, {_INPUTS}, STORED[:, ::1], STORED[::1], {_ROWS})")
def _project(rows, inputs, weight, bias, output):  # type: ignore[no-untyped-def]
    """Store a product plus `bias` [out] in `output`; an empty `bias` [0] means no bias."""
    multiply(rows, inputs, weight, output)
    add_bias(bias, output)


@compiled(
    f"void({_ROWS}, {_ROWS}, {_ROWS}, STORED[::1], float32,"
    + 3 * " STORED[:, ::1], STORED[::1],"
    + f" STORED[::1], STORED[::1], {_ROWS}, {_INPUTS}, {_ROWS}, {_ROWS}, {_ROWS})"
)
def _before(  # type: ignore[no-untyped-def]
    hidden, cosine, sine, norm, epsilon, weight_q, bias_q, weight_k, bias_k, weight_v, bias_v,
    norm_q, norm_k, normed, inputs, query, key, value,
):  # fmt: skip
    normalize(hidden, norm, epsilon, normed)
    # Arrange the rows once for the three projections.
    arrange(normed, inputs)
    _project(normed, inputs, weight_q, bias_q, query)
    _project(normed, inputs, weight_k, bias_k, key)
    _project(normed, inputs, weight_v, bias_v, value)
    rotate(query, norm_q, epsilon, cosine, sine)
    rotate(key, norm_k, epsilon, cosine, sine)


@compiled(f"void({_ROWS}, {_ROWS})")
def _gate(gate, up):  # type: ignore[no-untyped-def]
    """`gate` = SiLU(`gate`) · `up`, in place."""
    for m in range(len(gate)):
        for k in range(gate.shape[1]):
            value = gate[m, k]
            gate[m, k] = value / (float32(1) + exponential(-value)) * up[m, k]


@compiled(
    f"void({_ROWS}, {_ROWS}, {_INPUTS}, STORED[:, ::1], STORED[::1], float32,"
    + 3 * " STORED[:, ::1],"
    + f" {_ROWS}, {_INPUTS}, {_ROWS}, {_ROWS}, {_INPUTS}, {_ROWS})"
)
def _after(  # type: ignore[no-untyped-def]
    hidden, attended, inputs_attended, weight_o, norm, epsilon, weight_gate, weight_up, weight_down,
    normed, inputs, gate, up, inputs_gated, output,
):  # fmt: skip
    arrange(attended, inputs_attended)
    multiply(attended, inputs_attended, weight_o, output)
    output += hidden  # residual
    normalize(output, norm, epsilon, normed)
    arrange(normed, inputs)  # once for gate and up
    multiply(normed, inputs, weight_gate, gate)
    multiply(normed, inputs, weight_up, up)
    _gate(gate, up)
    arrange(gate, inputs_gated)
    multiply(gate, inputs_gated, weight_down, normed)
    output += normed  # residual


class DecoderLayerKernel(LayerKernel):
    """A layer with row-major weights [out, in] in float32 or bfloat16, for few rows."""

    rows_max = FEW_ROWS

    def __init__(self, weights: LayerWeights, head_dim: int, epsilon: float) -> None:
        super().__init__(weights, head_dim, epsilon)
        for kernel in (_before, _after):
            kernel.load(weights.query.dtype)

    def _run_before(self, hidden: torch.Tensor, rotation: Arrays, outputs: Arrays) -> None:
        inputs = inputs_buffer(hidden, self.hidden_size)
        normed = torch.empty_like(hidden).numpy()
        _before(hidden.numpy(), *rotation, *self.weights_before, normed, inputs, *outputs)

    def _run_after(self, hidden: torch.Tensor, attended: torch.Tensor, output: np.ndarray) -> None:
        gate, up = hidden.new_empty(2, len(hidden), self.gated_size).numpy()
        _after(
            *(hidden.numpy(), attended.numpy(), inputs_buffer(hidden, attended.shape[1])),
            *self.weights_after,
            *(torch.empty_like(hidden).numpy(), inputs_buffer(hidden, self.hidden_size)),
            *(gate, up, inputs_buffer(hidden, self.gated_size), output),
        )
