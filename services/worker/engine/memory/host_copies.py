"""Copies of slabs in host memory, so that dropped slabs come back without disk or network.

They are made while the model is loaded: a copy when a slab is dropped would delay the relief that
the drop is for. There are none by default: the workers of a host would compete for its memory, and
on a CPU a copy would take the memory that the drop gains.
"""

import torch


class HostCopies:
    """Copies of the first slabs that fit into `budget_bytes`.

    `pinned`: in pages that a GPU can read at full speed.
    """

    def __init__(self, budget_bytes: int = 0, *, pinned: bool = False) -> None:
        self._left_bytes = budget_bytes
        self._pinned = pinned
        self._copies: dict[str, torch.Tensor] = {}

    def keep(self, name: str, slab: torch.Tensor) -> None:
        """Copy a slab, uint8 [n], if the budget allows; a later copy of the name is ignored."""
        if name in self._copies or slab.numel() > self._left_bytes:
            return
        self._left_bytes -= slab.numel()
        copy = torch.empty(slab.numel(), dtype=torch.uint8, pin_memory=self._pinned)
        self._copies[name] = copy.copy_(slab)

    def get(self, name: str) -> torch.Tensor | None:
        """Return the copy of a slab, uint8 [n], to read; None if there is none."""
        return self._copies.get(name)

    def remove(self, name: str) -> None:
        """Free a copy that does not match the slab's digest."""
        self._copies.pop(name, None)
