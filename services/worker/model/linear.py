"""Linear layers and norms over slab views, for a compute dtype other than the storage dtype.

On AVX2 a native bfloat16 matrix product is five to ten times slower than a float32 one from 16
rows on, while upcasting a weight costs a few percent of the product and halves the memory read. So
weights stay in bfloat16 in the arena and each is upcast into one scratch buffer just before use.
"""

import torch
from torch import nn
from torch.nn import functional


class UpcastScratch:
    """One buffer of the compute dtype that holds the rows of a weight being used."""

    def __init__(self, size_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=device)

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`rows` [..., in] times `weight` [out, in] transposed, plus `bias` [out]: [..., out].

        A weight larger than the buffer is taken in slices of its rows.
        """
        out_features, in_features = weight.shape
        slice_rows = max(1, self._buffer.numel() // in_features)
        if slice_rows >= out_features:
            return functional.linear(rows, self._upcast(weight), self._as_compute(bias))
        flat = rows.reshape(-1, in_features)
        output = flat.new_empty(len(flat), out_features)
        for first in range(0, out_features, slice_rows):
            last = min(first + slice_rows, out_features)
            torch.mm(flat, self._upcast(weight[first:last]).t(), out=output[:, first:last])
        if bias is not None:
            output += bias
        return output.view(*rows.shape[:-1], out_features)

    def _upcast(self, weight: torch.Tensor) -> torch.Tensor:
        return self._buffer[: weight.numel()].view(weight.shape).copy_(weight)

    def _as_compute(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None if bias is None else bias.to(self._buffer.dtype)


class UpcastLinear(nn.Module):
    """Stands in for `nn.Linear`; the parameters are slab views in the storage dtype."""

    def __init__(
        self, scratch: UpcastScratch, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__()
        self._scratch = scratch
        self._weight = weight
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._scratch.linear(rows, self._weight, self._bias)


class Float32RmsNorm(nn.Module):
    """The RMSNorm of `transformers` for float32 activations, in two operations instead of six."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self._weight = weight
        self._epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(hidden_states, hidden_states.shape[-1:], None, self._epsilon)
        return normed.mul_(self._weight)
