"""Kernels of the root mean square norm (RMSNorm) and of rotary embeddings (RoPE).

The norm makes two passes over a row while it is in the cache. Measured with 14 rows of 576: half
the time of torch, which needs six operations.
"""

import numpy as np
import torch
from numba import float32

from services.worker.engine.model.cpu_kernels.compiler import compiled, float32_of, stored_array


@compiled("float32(float32[::1], float32)")
def norm_scale(row, epsilon):  # type: ignore[no-untyped-def]
    """Return the factor that scales a row to root mean square 1."""
    total = float32(0)
    for k in range(len(row)):
        total += row[k] * row[k]
    return float32(1) / np.sqrt(total / float32(len(row)) + epsilon)


@compiled("void(float32[:, ::1], STORED[::1], float32, float32[:, ::1])")
def normalize(rows, weight, epsilon, output):  # type: ignore[no-untyped-def]
    """Write RMSNorm(`rows`) · `weight` to `output` [rows, size], which may be `rows`."""
    count, size = rows.shape
    for m in range(count):
        row, normed = rows[m], output[m]
        scale = norm_scale(row, epsilon)
        for k in range(size):
            normed[k] = row[k] * scale * float32_of(weight[k])


class RmsNorm:
    """RMSNorm with a `weight` [size] in float32 or bfloat16 in host memory."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        normalize.load(weight.dtype)
        self._weight = stored_array(weight)
        self._epsilon = np.float32(epsilon)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size] → the same shape, contiguous; both float32."""
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        output = torch.empty_like(rows)
        normalize(rows.numpy(), self._weight, self._epsilon, output.numpy())
        return output.view(hidden.shape)


_ROWS = "float32[:, ::1]"


@compiled(f"void({_ROWS}, STORED[::1], float32, {_ROWS}, {_ROWS})")
def rotate(rows, norm, epsilon, cosine, sine):  # type: ignore[no-untyped-def]
    """Apply RoPE to `rows` [rows, head × head_dim] in place, after a head norm unless it is empty.

    `cosine` and `sine` are [rows, head_dim]. The halves of a head are real and imaginary parts.
    """
    size = cosine.shape[1]
    half = size // 2
    for m in range(len(rows)):
        heads = rows[m].reshape((-1, size))  # [head, head_dim]
        if len(norm):
            normalize(heads, norm, epsilon, heads)
        for head in heads:
            # Multiply the complex number (first, second) by (cosine, sine).
            for k in range(half):
                first, second = head[k], head[half + k]
                head[k] = first * cosine[m, k] - second * sine[m, k]
                head[half + k] = second * cosine[m, half + k] + first * sine[m, half + k]
