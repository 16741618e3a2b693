"""Skinny GEMM: few rows times a row-major weight, in little more time than reading the weight.

A matrix library first repacks the weight, which pays off only for many rows. A *team* is the rows
that share a vector: the vector holds 4 consecutive inputs of each of them.

Measured with SmolLM2-135M, single thread, all products of its layers in alternation with
`functional.linear`, as shares of its time. With vectors of 512 bits, 1 / 4 / 8 / 16 / 32 / 48 / 64
rows took 1.1 / 0.7 / 0.55 / 0.6 / 0.85 / 0.95 / 1.0 in float32, and
0.5 / 0.4 / 0.4 / 0.45 / 0.7 / – / 1.0 with bfloat16 weights, which the library does not multiply
without a cast to float32. With vectors of 256 bits (on the same CPU,
whose library may still use 512), 1 / 4 / 8 / 16 / 24 / 32 rows took
1.0 / 0.65 / 0.6 / 0.75 / 0.95 / 1.15 in float32, and 1 / 4 / 8 / 16 / 32 rows
0.5 / 0.4 / 0.4 / 0.65 / 1.05 in bfloat16.
"""

import numpy as np
import torch
from numba import float32

from services.worker.engine.model.cpu_kernels import ROWS_MAX
from services.worker.engine.model.cpu_kernels.compiler import (
    VECTOR_FLOATS,
    WIDE_FLOATS,
    compiled,
    float32_of,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.tile_product import BLOCK, PART, TEAM, tile_product

_TEAMS = 4
"""Maximum teams per step, which share each loaded vector of weights."""
_SUMS = 16 if VECTOR_FLOATS == WIDE_FLOATS else 9
"""Accumulator vectors that fit into the registers beside inputs and weights."""
_HEIGHT = 4
"""Weight rows per step, if the accumulators of all teams fit into registers."""
_HEIGHT_FULL, _HEIGHT_FEW = min(_HEIGHT, _SUMS // _TEAMS), min(_HEIGHT, _SUMS // (_TEAMS - 1))
FEW_ROWS = ROWS_MAX if VECTOR_FLOATS == WIDE_FLOATS else 24
"""Maximum rows for which this kernel is faster than torch's library."""
_PRODUCT = "void(float32[:, ::1], float32[:, :, ::1], STORED[:, ::1], float32[:, ::1])"


@compiled("void(float32[:, ::1], float32[:, :, ::1])")
def arrange(rows, inputs):  # type: ignore[no-untyped-def]
    """Copy `rows` [rows, in] by teams to `inputs` [team, part, VECTOR_FLOATS], padded with 0."""
    for team in range(len(inputs)):
        for member in range(TEAM):
            m = team * TEAM + member
            for part in range(inputs.shape[1]):
                for k in range(PART):
                    value = rows[m, part * PART + k] if m < len(rows) else float32(0)
                    inputs[team, part, member * PART + k] = value


@compiled(
    "void(float32[:, ::1], float32[:, ::1], STORED[:, ::1], int64, int64, int64, int64,"
    " float32[:, ::1])"
)
def _finish(sums, rows, weight, teams, height, first, n, output):  # type: ignore[no-untyped-def]
    """Add the four parts of `sums` of `tile_product` and the inputs after the last block."""
    size = rows.shape[1]
    for index in range(min(height, len(weight) - n)):
        for team in range(teams):
            parts = sums[index * teams + team]
            for member in range(TEAM):
                m, part = (first + team) * TEAM + member, member * PART
                if m < len(rows):
                    total = (parts[part] + parts[part + 1]) + (parts[part + 2] + parts[part + 3])
                    for k in range(size // BLOCK * BLOCK, size):
                        total += rows[m, k] * float32_of(weight[n + index, k])
                    output[m, n + index] = total


@compiled(_PRODUCT)
def multiply(rows, inputs, weight, output):  # type: ignore[no-untyped-def]
    """Write `rows` [rows, in] · `weight` [out, in] transposed to `output` [rows, out].

    `inputs` are the rows after `arrange`. Every element is summed in a fixed order, so it does not
    depend on the other rows (batch invariance).
    """
    teams = len(inputs)
    whole = teams // _TEAMS * _TEAMS
    rest = teams - whole
    sums = np.empty((_TEAMS * _HEIGHT, VECTOR_FLOATS), np.float32)
    # Fewer teams leave registers for more weight rows per step.
    height = _HEIGHT_FULL if whole else _HEIGHT_FEW
    # Loop over weight rows first: the weight is read once, and the few inputs stay in the cache.
    for n in range(0, len(weight), height):
        for first in range(0, whole, _TEAMS):
            tile_product(_TEAMS, _HEIGHT_FULL, inputs, first, weight, n, sums)
            _finish(sums, rows, weight, _TEAMS, height, first, n, output)
        if rest == 0:
            continue
        # `tile_product` takes compile-time constants, so every remainder needs a separate call.
        if whole:
            if rest == 1:
                tile_product(1, _HEIGHT_FULL, inputs, whole, weight, n, sums)
            elif rest == 2:
                tile_product(2, _HEIGHT_FULL, inputs, whole, weight, n, sums)
            else:
                tile_product(3, _HEIGHT_FULL, inputs, whole, weight, n, sums)
        elif rest == 1:
            tile_product(1, _HEIGHT_FEW, inputs, 0, weight, n, sums)
        elif rest == 2:
            tile_product(2, _HEIGHT_FEW, inputs, 0, weight, n, sums)
        else:
            tile_product(3, _HEIGHT_FEW, inputs, 0, weight, n, sums)
        _finish(sums, rows, weight, rest, height, whole, n, output)


@compiled(_PRODUCT)
def _multiply_rows(rows, inputs, weight, output):  # type: ignore[no-untyped-def]
    arrange(rows, inputs)
    multiply(rows, inputs, weight, output)


def inputs_buffer(rows: torch.Tensor, in_features: int) -> np.ndarray:
    """Allocate the output of `arrange` for `rows` with `in_features` inputs."""
    # Allocate by torch, which aligns memory for vectors.
    inputs = rows.new_empty(
        -(-len(rows) // TEAM), in_features // BLOCK * BLOCK // PART, VECTOR_FLOATS
    )
    array: np.ndarray = inputs.numpy()
    return array


class SkinnyProduct:
    """Multiplies by a `weight` [out, in], float32 or bfloat16, contiguous, in host memory."""

    rows_max = FEW_ROWS

    def __init__(self, weight: torch.Tensor) -> None:
        _multiply_rows.load(weight.dtype)
        self._weight = stored_array(weight)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [rows, in] → [rows, out], both float32; a result depends on its row alone.

        Raises ValueError if `in` does not match.
        """
        out_features, in_features = self._weight.shape
        # Check the shape here, because the kernel does not check bounds.
        if rows.shape[1] != in_features:
            raise ValueError(f"rows {tuple(rows.shape)} do not match weight {self._weight.shape}")
        output = rows.new_empty(len(rows), out_features)
        if len(rows):
            inputs = inputs_buffer(rows, in_features)
            _multiply_rows(rows.contiguous().numpy(), inputs, self._weight, output.numpy())
        return output
