"""Linear layers and norms whose parameters are views of the engine's memory (slabs).

The dtype of activations (compute dtype) may be wider than that of weights (storage dtype). On AVX2
and from 16 rows on, a native bfloat16 product takes five to ten times as long as a float32 product,
and casting a weight takes a few percent of the product. So each row-major bfloat16 weight is cast
to float32 in a scratch buffer just before its use; for few rows, a kernel casts in registers. With
weights in panels (a packed layout), rows are rounded to bfloat16 instead, or vector kernels cast
weights in registers.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from services.worker.engine.memory.panels import in_panels

if TYPE_CHECKING:
    from services.worker.engine.model.cpu_kernels.panel_gemm import PanelProduct
    from services.worker.engine.model.cpu_kernels.skinny_gemm import SkinnyProduct


class UpcastScratch:
    """Multiplies by weights after casting them to the compute dtype, in a reused buffer."""

    def __init__(self, size_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=device)

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return `rows` [rows, in] · `weight` [out, in] transposed + `bias` [out]: [rows, out]."""
        out_features, in_features = weight.shape
        slice_rows = max(1, self._buffer.numel() // in_features)
        if slice_rows >= out_features:
            return functional.linear(rows, self._upcast(weight), self._as_compute(bias))
        output = rows.new_empty(len(rows), out_features)
        # The weight exceeds the buffer: cast and multiply it in slices of outputs.
        for first in range(0, out_features, slice_rows):
            last = min(first + slice_rows, out_features)
            torch.mm(rows, self._upcast(weight[first:last]).t(), out=output[:, first:last])
        if bias is not None:
            output += bias
        return output

    def _upcast(self, weight: torch.Tensor) -> torch.Tensor:
        return self._buffer[: weight.numel()].view(weight.shape).copy_(weight)

    def _as_compute(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self._buffer.dtype)


class SlabLinear(nn.Module):
    """Replaces `nn.Linear`; the parameters are views, cast by `scratch` unless it is None.

    `compiled`: use a compiled kernel for up to its `rows_max` rows, or for any number of rows if
    the weight is packed in panels.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scratch: UpcastScratch | None,
        *,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        self._linear = functional.linear if scratch is None else scratch.linear
        self._weight = weight
        self._bias = bias
        self._compiled = _compiled_product(weight) if compiled else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out]."""
        flat = rows.reshape(-1, rows.shape[-1])
        # `rows_max` is None if the kernel takes any number of rows.
        product = self._compiled
        if product is None or len(flat) > (product.rows_max or len(flat)):
            output = self._linear(flat, self._weight, self._bias)
        else:
            output = product(flat)
            if self._bias is not None:
                output += self._bias
        return output.view(*rows.shape[:-1], output.shape[-1])


class Float32RmsNorm(nn.Module):
    """The RMSNorm of `transformers` for float32 activations, with fewer than its six operations.

    `compiled`: use a compiled kernel.
    """

    def __init__(self, weight: torch.Tensor, epsilon: float, *, compiled: bool = False) -> None:
        super().__init__()
        self._weight = weight
        self._epsilon = epsilon
        self._compiled = _compiled_norm(weight, epsilon) if compiled else None

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self._compiled is not None:
            return self._compiled(hidden_states)
        normed = functional.rms_norm(hidden_states, hidden_states.shape[-1:], None, self._epsilon)
        return normed.mul_(self._weight)


def _compiled_product(weight: torch.Tensor) -> "SkinnyProduct | PanelProduct":
    if in_panels(weight):
        from services.worker.engine.model.cpu_kernels.panel_gemm import PanelProduct

        return PanelProduct(weight)
    from services.worker.engine.model.cpu_kernels.skinny_gemm import SkinnyProduct

    return SkinnyProduct(weight)


def _compiled_norm(weight: torch.Tensor, epsilon: float) -> Callable[[torch.Tensor], torch.Tensor]:
    from services.worker.engine.model.cpu_kernels.rms_norm import RmsNorm

    return RmsNorm(weight, epsilon)
