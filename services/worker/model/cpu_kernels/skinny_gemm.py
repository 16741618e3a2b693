"""The product of few rows and a weight, at the speed of reading the weight.

A matrix library copies a weight into the layout that it multiplies fast, which pays from many rows
on. Measured on AVX2 with SmolLM2-135M, one thread, medians of whole iterations in turn with
`functional.linear`: 1 / 2 / 4 / 8 / 14 / 24 / 32 / 48 / 64 rows took 1.0 / 0.7 / 0.75 / 0.7 / 0.7 /
0.8 / 0.85 / 0.9 / 0.9 of the time in float32; with weights in bfloat16, which are upcast otherwise,
1 / 4 / 14 / 32 / 64 rows 0.6 / 0.5 / 0.6 / 0.75 / 0.85. From 96 rows on the library is as fast.
On AVX-512, products alone: 1 / 2 / 4 / 8 / 14 / 24 / 32 / 48 / 64 rows 1.25 / 1.15 / 0.8 / 0.8 /
0.65 / 0.85 / 1.0 / 1.0 / 1.1; bfloat16, 1 / 4 / 14 / 32 / 64 rows 0.5 / 0.45 / 0.4 / 0.65 / 0.9.
One and two rows take the kernel all the same: a row then has the same bits in any company.
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
"""Rows of the weight that are multiplied at once with two rows: eight sums stay in registers."""


@compiled(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1])",
    "void(float32[:, ::1], uint16[:, ::1], float32[:, ::1])",
)
def _multiply(rows, weight, output):  # type: ignore[no-untyped-def]
    """`output` [rows, out] = `rows` [rows, in] · `weight` [out, in] transposed.

    Every element is the sum of one loop in one order, so it does not depend on the other rows. At
    the end of the rows, and of the weight, the last one is taken more than once.
    """
    size = rows.shape[1]
    last_row, last = len(rows) - 1, len(weight) - 1
    tile = np.empty((_TILE, size), np.float32)
    tile0, tile1, tile2, tile3 = tile[0], tile[1], tile[2], tile[3]
    # The next weights are fetched while these are multiplied, a share of them with each pair.
    pairs = (len(rows) + 1) // 2
    lines = _TILE * weight.strides[0] // CACHE_LINE_BYTES + 1
    share_bytes = (lines + pairs - 1) // pairs * CACHE_LINE_BYTES
    for n in range(0, len(weight), _TILE):
        for index in range(_TILE):
            stored, widened = weight[min(n + index, last)], tile[index]
            for k in range(size):
                widened[k] = float32_of(stored[k])
        for pair in range(pairs):
            for offset in range(pair * share_bytes, (pair + 1) * share_bytes, CACHE_LINE_BYTES):
                prefetch(weight, n + _TILE, offset)
            m0, m1 = 2 * pair, min(2 * pair + 1, last_row)
            row0, row1 = rows[m0], rows[m1]
            sum00 = sum01 = sum02 = sum03 = float32(0)
            sum10 = sum11 = sum12 = sum13 = float32(0)
            for k in range(size):
                factor0, factor1 = row0[k], row1[k]
                sum00 += factor0 * tile0[k]
                sum10 += factor1 * tile0[k]
                sum01 += factor0 * tile1[k]
                sum11 += factor1 * tile1[k]
                sum02 += factor0 * tile2[k]
                sum12 += factor1 * tile2[k]
                sum03 += factor0 * tile3[k]
                sum13 += factor1 * tile3[k]
            n1, n2, n3 = min(n + 1, last), min(n + 2, last), min(n + 3, last)
            output[m0, n], output[m1, n] = sum00, sum10
            output[m0, n1], output[m1, n1] = sum01, sum11
            output[m0, n2], output[m1, n2] = sum02, sum12
            output[m0, n3], output[m1, n3] = sum03, sum13


class SkinnyProduct:
    """A `weight` [out, in] in float32 or bfloat16, contiguous, in host memory, for few rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = stored_array(weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] → [rows, out], both float32; the same bits of a row in any company.

        Raises ValueError for another `in`.
        """
        # The kernel does not look where it reads.
        if rows.shape[1] != self._weight.shape[1]:
            raise ValueError(f"rows {tuple(rows.shape)} do not fit a weight {self._weight.shape}")
        output = rows.new_empty(len(rows), len(self._weight))
        if len(rows):
            _multiply(rows.contiguous().numpy(), self._weight, output.numpy())
        return output
