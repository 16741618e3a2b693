"""The product of few rows and a weight, at the speed of reading the weight.

A matrix library copies a weight into the layout that it multiplies fast, which pays from many rows
on. Measured on AVX2 with the layers of SmolLM2-135M, one thread, medians: 1 / 2 / 4 / 8 / 14 / 24
rows took 1.0 / 0.7 / 0.7 / 0.7 / 0.75 / 0.9 of the time of `functional.linear` in float32, and with
weights in bfloat16 0.5 / 0.4 / 0.4 / 0.5 / 0.65 / 0.75 of upcasting and multiplying.
"""

import numpy as np
import torch
from numba import float32

from services.worker.model.cpu_kernels.compiler import (
    CACHE_LINE_BYTES,
    compiled,
    float32_of,
    prefetch,
    stored_array,
)

_TILE = 4
"""Rows of the weight that are multiplied at once: their sums and factors stay in registers."""


@compiled(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1])",
    "void(float32[:, ::1], uint16[:, ::1], float32[:, ::1])",
)
def _multiply(rows, weight, output):  # type: ignore[no-untyped-def]
    """`output` [rows, out] = `rows` [rows, in] · `weight` [out, in] transposed.

    Every element is the sum of one loop in one order, so it does not depend on the other rows. A
    tile at the end of the weight holds the last row more than once.
    """
    row_count, size = rows.shape
    last = len(weight) - 1
    tile = np.empty((_TILE, size), np.float32)
    tile0, tile1, tile2, tile3 = tile[0], tile[1], tile[2], tile[3]
    # The next weights are fetched while these are multiplied, a share of them with each row.
    lines = _TILE * weight.strides[0] // CACHE_LINE_BYTES + 1
    share_bytes = (lines + row_count - 1) // row_count * CACHE_LINE_BYTES
    for n in range(0, len(weight), _TILE):
        for index in range(_TILE):
            stored = weight[min(n + index, last)]
            widened = tile[index]
            for k in range(size):
                widened[k] = float32_of(stored[k])
        for m in range(row_count):
            for offset in range(m * share_bytes, (m + 1) * share_bytes, CACHE_LINE_BYTES):
                prefetch(weight, n + _TILE, offset)
            row = rows[m]
            sum0 = sum1 = sum2 = sum3 = float32(0)
            for k in range(size):
                factor = row[k]
                sum0 += factor * tile0[k]
                sum1 += factor * tile1[k]
                sum2 += factor * tile2[k]
                sum3 += factor * tile3[k]
            output[m, n] = sum0
            output[m, min(n + 1, last)] = sum1
            output[m, min(n + 2, last)] = sum2
            output[m, min(n + 3, last)] = sum3


class SkinnyProduct:
    """A `weight` [out, in] in float32 or bfloat16, contiguous, in host memory, for few rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = stored_array(weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], both float32; the same bits of a row in any company."""
        output = rows.new_empty(len(rows), len(self._weight))
        _multiply(rows.contiguous().numpy(), self._weight, output.numpy())
        return output
