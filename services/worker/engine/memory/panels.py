"""Panels: the packed layout of weights for matrix products on a CPU, and conversions to it.

A weight [out, in] is divided into panels of 64 outputs. A panel is a sequence of lines. A line has
a word of four bytes for each of the 64 outputs, and a word holds two consecutive inputs in
bfloat16, or a single input in float32. The shape is `[out / 64][in / 2][64][2]` in bfloat16 and
`[out / 64][in][64][1]` in float32, on every CPU, so that workers can compare and exchange
parameters. Workers with different layouts have different digests and never form a group.
"""

import torch

PANEL = 64
"""Outputs (rows of the weight) per panel."""
WORD_BYTES = 4
"""Size of a word: the consecutive inputs of an output that are adjacent in memory."""


def inputs_per_word(dtype: torch.dtype) -> int:
    """Return the number of consecutive inputs of an output in a word."""
    return WORD_BYTES // dtype.itemsize


def tag(dtype: torch.dtype) -> bytes:
    """Return bytes that identify the layout, for the digest of parameters in panels."""
    return f"panels-{PANEL}x{inputs_per_word(dtype)}".encode()


def fits(shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether a parameter of this shape can be packed; the dtype has two or four bytes."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % inputs_per_word(dtype) == 0


def panel_shape(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the packed shape [panel, line, PANEL, inputs per word] of a weight [out, in]."""
    per_word = inputs_per_word(dtype)
    return shape[0] // PANEL, shape[1] // per_word, PANEL, per_word


def in_panels(weight: torch.Tensor) -> bool:
    """Whether a weight is packed in panels, not row-major."""
    return weight.dim() == 4


def outputs_of(weight: torch.Tensor) -> int:
    """Return the number of outputs of a weight, packed or row-major."""
    return weight.shape[0] * (PANEL if in_panels(weight) else 1)


def inputs_of(weight: torch.Tensor) -> int:
    """Return the number of inputs of a weight, packed or row-major."""
    return weight.numel() // outputs_of(weight)


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous weight [out, in] in the packed order; see `panel_shape`."""
    panels, lines, _, per_word = panel_shape(tuple(weight.shape), weight.dtype)
    return weight.view(panels, PANEL, lines, per_word).permute(0, 2, 1, 3)


def rows_of(panels: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Gather the outputs `indices` [n] of a packed weight as rows [n, in]."""
    rows = panels[indices // PANEL, :, indices % PANEL]  # [n, line, inputs per word]
    return rows.flatten(1)
