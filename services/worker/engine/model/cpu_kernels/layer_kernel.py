"""The base class of decoder layers by CPU kernels: a call before attention, and a call after it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.memory.panels import outputs_of
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
    float32_of,
    stored_array,
)

Arrays = Sequence[np.ndarray]


@compiled("void(STORED[::1], float32[:, ::1])")
def add_bias(bias, output):  # type: ignore[no-untyped-def]
    """Add `bias` [out] to `output` [rows, out]; an empty `bias` [0] means no bias."""
    if len(bias):
        for m in range(len(output)):
            for k in range(len(bias)):
                output[m, k] += float32_of(bias[k])


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The parameters of a layer, float32 or bfloat16, contiguous, in host memory.

    Weights are row-major [out, in] or packed in panels. Missing biases and head norms are None.
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


class LayerKernel(ABC):
    """A Llama layer: norm, attention, norm, gated MLP with SiLU.

    `rows_max`: maximum rows for which it is faster than torch's modules; None: any number.
    """

    rows_max: int | None = None

    def __init__(self, weights: LayerWeights, head_dim: int, epsilon: float) -> None:
        self.weights = weights
        self.head_dim = head_dim
        self._sizes = [outputs_of(weight) for weight in (weights.query, weights.key, weights.value)]
        self.hidden_size = len(weights.input_norm)
        self.gated_size = outputs_of(weights.gate)
        # Build the arguments for weights once; a call adds the activations. Kernels have no
        # optional arguments, so pass an empty array for a missing parameter.
        empty = stored_array(weights.input_norm[:0])

        def array(tensor: torch.Tensor | None) -> np.ndarray:
            return empty if tensor is None else stored_array(tensor)

        self.weights_before = (
            *(array(weights.input_norm), np.float32(epsilon)),
            *(array(weights.query), array(weights.query_bias)),
            *(array(weights.key), array(weights.key_bias)),
            *(array(weights.value), array(weights.value_bias)),
            *(array(weights.query_norm), array(weights.key_norm)),
        )
        self.weights_after = (
            *(array(weights.output), array(weights.post_attention_norm), np.float32(epsilon)),
            *(array(weights.gate), array(weights.up), array(weights.down)),
        )

    def before(
        self, hidden: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value [rows, head, head_dim], rotated, for `hidden` [rows, hidden].

        All are float32. `cosine` and `sine` are [rows, head_dim]. Raises ValueError if the shapes
        do not match.
        """
        rows = len(hidden)
        angles = (rows, self.head_dim)
        # Check the shapes here, because kernels do not check bounds.
        if hidden.shape[1] != self.hidden_size or cosine.shape != angles or sine.shape != angles:
            raise ValueError(f"hidden states {tuple(hidden.shape)} do not match this layer")
        outputs = [hidden.new_empty(rows, size) for size in self._sizes]
        rotation = (cosine.numpy(), sine.numpy())
        self._run_before(hidden, rotation, [output.numpy() for output in outputs])
        query, key, value = (output.view(rows, -1, self.head_dim) for output in outputs)
        return query, key, value

    def after(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [rows, hidden]; `attended` is [rows, head, head_dim]."""
        rows = len(hidden)
        attended = attended.view(rows, -1)
        if attended.shape[1] != self._sizes[0] or hidden.shape[1] != self.hidden_size:
            raise ValueError(f"attended {tuple(attended.shape)} does not match this layer")
        output = torch.empty_like(hidden)
        self._run_after(hidden, attended, output.numpy())
        return output

    @abstractmethod
    def _run_before(self, hidden: torch.Tensor, rotation: Arrays, outputs: Arrays) -> None:
        """Write query, key and value to `outputs`; `rotation` is cosine and sine."""

    @abstractmethod
    def _run_after(self, hidden: torch.Tensor, attended: torch.Tensor, output: np.ndarray) -> None:
        """Write the layer's output [rows, hidden] to `output`."""
