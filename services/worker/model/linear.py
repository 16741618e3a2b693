"""Linear layers and norms over slab views.

The compute dtype may differ from the storage dtype: on AVX2 a native bfloat16 matrix product is
five to ten times slower than a float32 one from 16 rows on, while upcasting a weight costs a few
percent of the product and halves the memory read. So weights stay in bfloat16 in the arena and each
is upcast into one scratch buffer just before use.
"""

import torch
from torch import nn
from torch.nn import functional

FEW_ROWS = range(2, 5)
"""Batches for which a CPU multiplies by the weight from the left: a quarter to a third less time.

The matrix product blocks its right-hand side in fours: measured on AVX2 with the shapes of
SmolLM2-135M, 2 / 3 / 4 rows took 0.80 / 0.73 / 0.65 of the time of `functional.linear`, from 5 rows
on it is the same or more. A weight that was just upcast is in the cache: there, the left side takes
a third to a half more time instead.
"""


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear` of `rows` [rows, in] and `weight` [out, in], by the faster side."""
    if len(rows) not in FEW_ROWS or rows.dtype != torch.float32 or rows.device.type != "cpu":
        return functional.linear(rows, weight, bias)
    product = torch.mm(weight, rows.contiguous().t()).t().contiguous()
    return product if bias is None else product + bias


class UpcastScratch:
    """One buffer of the compute dtype that holds the rows of a weight being used."""

    def __init__(self, size_bytes: int, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(size_bytes // dtype.itemsize, dtype=dtype, device=device)

    def linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """`rows` [rows, in] times `weight` [out, in] transposed, plus `bias` [out]: [rows, out].

        A weight larger than the buffer is taken in slices of its rows.
        """
        out_features, in_features = weight.shape
        slice_rows = max(1, self._buffer.numel() // in_features)
        if slice_rows >= out_features:
            return functional.linear(rows, self._upcast(weight), self._as_compute(bias))
        output = rows.new_empty(len(rows), out_features)
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
    """Stands in for `nn.Linear`; the parameters are slab views, upcast if there is a `scratch`."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scratch: UpcastScratch | None
    ) -> None:
        super().__init__()
        self._linear = linear if scratch is None else scratch.linear
        self._weight = weight
        self._bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out]."""
        output = self._linear(rows.reshape(-1, rows.shape[-1]), self._weight, self._bias)
        return output.view(*rows.shape[:-1], output.shape[-1])


class Float32RmsNorm(nn.Module):
    """The RMSNorm of `transformers` for float32 activations, in two operations instead of six."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self._weight = weight
        self._epsilon = epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(hidden_states, hidden_states.shape[-1:], None, self._epsilon)
        return normed.mul_(self._weight)
