"""The order of a weight's values in a slab that is made for the processor's products.

A weight [out, in] lies in panels of 64 outputs. Within a panel, words of four bytes follow one
another, each for all of its outputs: a word holds two inputs in bfloat16, one in float32. That is
`[out / 64][in / 2][64][2]` or `[out / 64][in][64][1]`. This permutation is the same on every
processor, so that slabs can be compared and sent; workers with other orders have other digests and
never merge.
"""

import torch

PANEL = 64
"""Outputs of a panel."""
WORD_BYTES = 4
"""Inputs of one output that lie beside each other fill a word."""


def together(dtype: torch.dtype) -> int:
    """How many inputs of one output lie beside each other."""
    return WORD_BYTES // dtype.itemsize


def tag(dtype: torch.dtype) -> bytes:
    """Goes into the digest of a slab with panels."""
    return f"panels-{PANEL}x{together(dtype)}".encode()


def fits(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a parameter of this shape can lie in panels; the dtype has two or four bytes."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % together(dtype) == 0


def panel_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the panels of a weight of shape [out, in]."""
    beside = together(dtype)
    return shape[0] // PANEL, shape[1] // beside, PANEL, beside


def in_panels(weight: torch.Tensor) -> bool:
    """Whether a weight lies in panels, or else row-major."""
    return weight.dim() == 4


def outputs_of(weight: torch.Tensor) -> int:
    """How many outputs a weight has, in panels or not."""
    return weight.shape[0] * (PANEL if in_panels(weight) else 1)


def inputs_of(weight: torch.Tensor) -> int:
    """How many inputs a weight has, in panels or not."""
    return weight.numel() // outputs_of(weight)


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """[out, in], contiguous, as a view in the order of panels, see `panel_shape`."""
    panels, words, _, beside = panel_shape(tuple(weight.shape), weight.dtype)
    return weight.view(panels, PANEL, words, beside).permute(0, 2, 1, 3)


def rows_of(panels: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Some outputs of a weight in panels, `indices` [n], as rows [n, in]."""
    rows = panels[indices // PANEL, :, indices % PANEL]
    return rows.flatten(1)
