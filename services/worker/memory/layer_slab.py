"""The parameters of one layer (or of the embedding, or of the head) in one contiguous range."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from services.worker.errors import LayerNotResident
from services.worker.memory.arena import Arena

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a parameter lies in its slab; `offset_bytes` is a multiple of `ALIGNMENT_BYTES`."""

    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The parameters of a slab by name, all of one dtype, in the order of the model code."""

    dtype: torch.dtype
    places: dict[str, TensorPlace]
    size_bytes: int

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], dtype: torch.dtype) -> "SlabLayout":
        """Lay `shapes` (name, shape) one after the other."""
        places: dict[str, TensorPlace] = {}
        end_bytes = 0
        for name, shape in shapes:
            offset_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            places[name] = TensorPlace(shape, offset_bytes)
            end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        return cls(dtype, places, end_bytes)


class LayerSlab:
    """A slab in the arena; `name` appears in errors."""

    def __init__(self, arena: Arena, name: str, layout: SlabLayout) -> None:
        self.name = name
        self.layout = layout
        self._arena = arena
        self._range = arena.reserve(name, layout.size_bytes)
        flat = arena.tensor(self._range, layout.dtype)
        self._views = {
            parameter: self._view(flat, place) for parameter, place in layout.places.items()
        }
        self._resident = False

    @property
    def resident(self) -> bool:
        """Whether all its parameters are mapped."""
        return self._resident

    @property
    def chunks(self) -> int:
        """Chunks that the slab occupies when it is resident."""
        return len(self._range.handles)

    def views(self) -> dict[str, torch.Tensor]:
        """The parameters by name, as views of the range: valid for good, readable if resident."""
        return self._views

    def map(self, handles: list[int] | None = None) -> None:
        """Put memory behind the slab: `handles`, or free chunks. Contents are undefined."""
        chosen = self._arena.free_handles(self.chunks) if handles is None else handles
        if len(chosen) != self.chunks:
            raise ValueError(f"{self.name} needs {self.chunks} chunks, got {len(chosen)}")
        self._arena.map(self._range, 0, chosen)
        self._resident = True

    def retire(self) -> list[int]:
        """Forbid the slab's use but keep it mapped; returns its handles, sorted as mapped.

        The first half of a drop: they are mapped elsewhere now, and `unmap` follows when the
        iteration loop runs again.
        """
        self.check_resident()
        self._resident = False
        return [handle for handle in self._range.handles if handle is not None]

    def unmap(self) -> list[int]:
        """Take the memory away; returns the handles."""
        self._resident = False
        return self._arena.unmap(self._range, 0, self._range.mapped_chunks)

    def check_resident(self) -> None:
        """Raise LayerNotResident unless the parameters may be read."""
        if not self._resident:
            raise LayerNotResident(self.name)

    def _view(self, flat: torch.Tensor, place: TensorPlace) -> torch.Tensor:
        start = place.offset_bytes // self.layout.dtype.itemsize
        return flat[start : start + place.elements].view(place.shape)
