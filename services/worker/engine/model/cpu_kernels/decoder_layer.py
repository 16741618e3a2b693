"""The parts of a decoder layer before and after attention, for few rows, as two calls.

For few rows, a layer has some forty operations of a few microseconds each, and to call them costs
as much again. Rows are arranged for products once for query, key and value, and once for gate and
up.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numba import float32

from services.worker.engine.model.cpu_kernels.compiler import compiled, float32_of, stored_array
from services.worker.engine.model.cpu_kernels.exponential import exponential
from services.worker.engine.model.cpu_kernels.rms_norm import normalize
from services.worker.engine.model.cpu_kernels.skinny_gemm import (
    FEW_ROWS,
    arrange,
    multiply,
    room_for_inputs,
)

_STORED = ("float32", "uint16")
_ROWS, _INPUTS = "float32[:, ::1]", "float32[:, :, ::1]"


@compiled(
    *(f"void({_ROWS}, {_INPUTS}, {stored}[:, ::1], {stored}[::1], {_ROWS})" for stored in _STORED)
)
def _project(rows, inputs, weight, bias, output):  # type: ignore[no-untyped-def]
    """A product, plus `bias` [out]; an empty `bias` [0] means none."""
    multiply(rows, inputs, weight, output)
    if len(bias):
        for m in range(len(output)):
            for k in range(len(bias)):
                output[m, k] += float32_of(bias[k])


@compiled(*(f"void({_ROWS}, {stored}[::1], float32, {_ROWS}, {_ROWS})" for stored in _STORED))
def _turn(rows, norm, epsilon, cosine, sine):  # type: ignore[no-untyped-def]
    """Rotate `rows` [rows, head × head_dim] by their positions; apply `norm` before, if any.

    `cosine` and `sine` [rows, head_dim]; the halves of a head are the parts of complex numbers.
    """
    size = cosine.shape[1]
    half = size // 2
    for m in range(len(rows)):
        heads = rows[m].reshape((-1, size))
        if len(norm):
            normalize(heads, norm, epsilon, heads)
        for head in heads:
            for k in range(half):
                first, second = head[k], head[half + k]
                head[k] = first * cosine[m, k] - second * sine[m, k]
                head[half + k] = second * cosine[m, half + k] + first * sine[m, half + k]


@compiled(
    *(
        f"void({_ROWS}, {_ROWS}, {_ROWS}, {stored}[::1], float32,"
        + 3 * f" {stored}[:, ::1], {stored}[::1],"
        + f" {stored}[::1], {stored}[::1], {_ROWS}, {_INPUTS}, {_ROWS}, {_ROWS}, {_ROWS})"
        for stored in _STORED
    )
)
def _before(  # type: ignore[no-untyped-def]
    hidden, cosine, sine, norm, epsilon, weight_q, bias_q, weight_k, bias_k, weight_v, bias_v,
    norm_q, norm_k, normed, inputs, query, key, value,
):  # fmt: skip
    normalize(hidden, norm, epsilon, normed)
    arrange(normed, inputs)
    _project(normed, inputs, weight_q, bias_q, query)
    _project(normed, inputs, weight_k, bias_k, key)
    _project(normed, inputs, weight_v, bias_v, value)
    _turn(query, norm_q, epsilon, cosine, sine)
    _turn(key, norm_k, epsilon, cosine, sine)


@compiled(f"void({_ROWS}, {_ROWS})")
def _gate(gate, up):  # type: ignore[no-untyped-def]
    """`gate` becomes SiLU of itself times `up`."""
    for m in range(len(gate)):
        for k in range(gate.shape[1]):
            wanted = gate[m, k]
            gate[m, k] = wanted / (float32(1) + exponential(-wanted)) * up[m, k]


@compiled(
    *(
        f"void({_ROWS}, {_ROWS}, {_INPUTS}, {stored}[:, ::1], {stored}[::1], float32,"
        + 3 * f" {stored}[:, ::1],"
        + f" {_ROWS}, {_INPUTS}, {_ROWS}, {_ROWS}, {_INPUTS}, {_ROWS})"
        for stored in _STORED
    )
)
def _after(  # type: ignore[no-untyped-def]
    hidden, attended, inputs_attended, weight_o, norm, epsilon, weight_gate, weight_up, weight_down,
    normed, inputs, gate, up, inputs_gated, output,
):  # fmt: skip
    arrange(attended, inputs_attended)
    multiply(attended, inputs_attended, weight_o, output)
    output += hidden
    normalize(output, norm, epsilon, normed)
    arrange(normed, inputs)
    multiply(normed, inputs, weight_gate, gate)
    multiply(normed, inputs, weight_up, up)
    _gate(gate, up)
    arrange(gate, inputs_gated)
    multiply(gate, inputs_gated, weight_down, normed)
    output += normed


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of a layer, float32 or bfloat16, contiguous, in host memory.

    Weights are [out, in]. Biases and head norms that the layer lacks are None.
    """

    input_norm: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    post_attention_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    query_bias: torch.Tensor | None = None
    key_bias: torch.Tensor | None = None
    value_bias: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None


class DecoderLayerKernel:
    """A layer of the Llama shape: norm, attention, norm, gated MLP with SiLU."""

    rows_max = FEW_ROWS

    def __init__(self, weights: LayerWeights, head_dim: int, epsilon: float) -> None:
        self._head_dim = head_dim
        self._hidden_size = len(weights.input_norm)
        none = stored_array(weights.input_norm[:0])

        def array(tensor: torch.Tensor | None) -> np.ndarray:
            return none if tensor is None else stored_array(tensor)

        self._sizes = tuple(len(weight) for weight in (weights.query, weights.key, weights.value))
        self._gated_size = len(weights.gate)
        self._before = (
            *(array(weights.input_norm), np.float32(epsilon)),
            *(array(weights.query), array(weights.query_bias)),
            *(array(weights.key), array(weights.key_bias)),
            *(array(weights.value), array(weights.value_bias)),
            *(array(weights.query_norm), array(weights.key_norm)),
        )
        self._after = (
            *(array(weights.output), array(weights.post_attention_norm), np.float32(epsilon)),
            *(array(weights.gate), array(weights.up), array(weights.down)),
        )

    def before(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[rows, hidden] → query, key, value [rows, head, head_dim], rotated; all float32.

        `cosine` and `sine` [rows, head_dim]. Raises ValueError if they do not fit.
        """
        rows = len(hidden)
        turn = (rows, self._head_dim)
        # A kernel does not check bounds.
        if hidden.shape[1] != self._hidden_size or cosine.shape != turn or sine.shape != turn:
            raise ValueError(f"hidden states {tuple(hidden.shape)} do not fit this layer")
        outputs = [hidden.new_empty(rows, size) for size in self._sizes]
        _before(
            *(hidden.numpy(), cosine.numpy(), sine.numpy(), *self._before),
            *(torch.empty_like(hidden).numpy(), room_for_inputs(hidden, self._hidden_size)),
            *(output.numpy() for output in outputs),
        )
        query, key, value = (output.view(rows, -1, self._head_dim) for output in outputs)
        return query, key, value

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] before the layer and [rows, head, head_dim] attended → [rows, hidden]."""
        rows = len(hidden)
        attended = attended.view(rows, -1)
        if attended.shape[1] != self._sizes[0] or hidden.shape[1] != self._hidden_size:
            raise ValueError(f"attended {tuple(attended.shape)} does not fit this layer")
        output = torch.empty_like(hidden)
        gate, up = hidden.new_empty(2, rows, self._gated_size).numpy()
        _after(
            *(hidden.numpy(), attended.numpy(), room_for_inputs(hidden, self._sizes[0])),
            *self._after,
            *(torch.empty_like(hidden).numpy(), room_for_inputs(hidden, self._hidden_size)),
            *(gate, up, room_for_inputs(hidden, self._gated_size), output.numpy()),
        )
        return output
