"""The order of a weight's values in a slab that is made for matrix instructions.

A weight [out, in] in bfloat16 lies in panels of 64 outputs. Within a panel, pairs of inputs follow
one another, each for all of its outputs: `[out / 64][in / 2][64][2]`. This permutation is the same
on every processor, so that slabs can be compared and sent; workers with other orders have other
digests and never merge.
"""

import torch

PANEL = 64
"""Outputs of a panel."""
PAIR = 2
"""Inputs of one output that lie beside each other."""
TAG = b"panels-64x2"
"""Goes into the digest of a slab with panels."""


def fits(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this shape can lie in panels."""
    return len(shape) == 2 and shape[0] % PANEL == 0 and shape[1] % PAIR == 0


def panel_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the panels of a weight of shape [out, in]."""
    return shape[0] // PANEL, shape[1] // PAIR, PANEL, PAIR


def outputs_of(weight: torch.Tensor) -> int:
    """How many outputs a weight has, in panels or not."""
    return weight.shape[0] * (PANEL if weight.dim() == 4 else 1)


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """[out, in], contiguous, as a view in the order of panels: [out / 64, in / 2, 64, 2]."""
    out_features, in_features = weight.shape
    split = weight.view(out_features // PANEL, PANEL, in_features // PAIR, PAIR)
    return split.permute(0, 2, 1, 3)


def rows_of(panels: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Some outputs of a weight in panels, `indices` [n], as rows [n, in]."""
    rows = panels[indices // PANEL, :, indices % PANEL]
    return rows.flatten(1)
