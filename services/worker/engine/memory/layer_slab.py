"""Slabs: the parameters of a layer, of the embedding or of the head in contiguous memory.

The memory comes from the arena in chunks. A worker drops slabs of layers that another worker runs,
and restores them later from a peer or from the model's files; a digest verifies the bytes.
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from services.worker.engine.memory import panels
from services.worker.engine.memory.arena import Arena, Handles
from services.worker.errors import InvalidStage, LayerNotResident, SlabCorrupted

ALIGNMENT_BYTES = 64


class SlabState(Enum):
    """ABSENT: not mapped. FILLING: mapped, contents not verified. RESIDENT: ready to run."""

    ABSENT = "absent"
    FILLING = "filling"
    RESIDENT = "resident"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a parameter in its slab; `offset_bytes` is a multiple of `ALIGNMENT_BYTES`.

    `in_panels`: its values are in the packed layout of module `panels`, not row-major.
    """

    shape: tuple[int, ...]
    offset_bytes: int
    in_panels: bool = False

    @property
    def elements(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The parameters of a slab by name, all of the same dtype, in the order of the model code."""

    dtype: torch.dtype
    places: dict[str, TensorPlace]
    size_bytes: int

    @classmethod
    def of(
        cls,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        dtype: torch.dtype,
        in_panels: Collection[str] = (),
    ) -> "SlabLayout":
        """Lay out `shapes` (name, shape) consecutively; pack the parameters of `in_panels`."""
        places: dict[str, TensorPlace] = {}
        end_bytes = 0
        for name, shape in shapes:
            offset_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            places[name] = TensorPlace(shape, offset_bytes, name in in_panels)
            end_bytes = offset_bytes + math.prod(shape) * dtype.itemsize
        return cls(dtype, places, end_bytes)

    @property
    def tag(self) -> bytes:
        """The order of values, as part of digests; empty if all parameters are row-major."""
        in_panels = any(place.in_panels for place in self.places.values())
        return panels.tag(self.dtype) if in_panels else b""


class WeightSource(Protocol):
    """A source of parameters.

    `on_device`: it computes them on the target's device, which changes their values; others read
    them into host memory.
    """

    on_device: bool

    def fill(self, name: str, target: torch.Tensor) -> None:
        """Write the parameter `name` to `target`, contiguous, cast to its dtype.

        Raises ModelError.
        """

    def close(self) -> None:
        """Close files. Idempotent."""


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...

    def digest(self) -> bytes: ...


class _Digests(NamedTuple):
    """The hashes of a slab's bytes; `sha256` after the first fill only."""

    xxh3: bytes
    sha256: bytes | None


def _digests_of(data: torch.Tensor, tag: bytes, *, first: bool) -> _Digests:
    array = data.numpy()
    xxh3 = xxhash.xxh3_128(tag)
    xxh3.update(array)
    if not first:
        return _Digests(xxh3.digest(), None)
    sha256 = hashlib.sha256(tag)
    sha256.update(array)
    return _Digests(xxh3.digest(), sha256.digest())


def _update(hashes: Sequence[_Hash | None], piece: torch.Tensor) -> None:
    """Update hashes with bytes in host memory."""
    data = piece.numpy()
    for part in hashes:
        if part is not None:
            part.update(data)


class LayerSlab:
    """A slab in the arena; `name` appears in errors.

    The digest (SHA-256) covers the layout's tag, the parameters and the padding. It is computed
    when the slab is first filled. Workers with the same model and layout have the same digests.
    """

    def __init__(self, arena: Arena, name: str, layout: SlabLayout) -> None:
        self.name = name
        self.layout = layout
        self._arena = arena
        self.reserved = arena.reserve(name, layout.size_bytes)
        self._bytes = arena.tensor(self.reserved, torch.uint8)[: layout.size_bytes]
        flat = arena.tensor(self.reserved, layout.dtype)
        self._views = {
            parameter: self._view(flat, place) for parameter, place in layout.places.items()
        }
        self._state = SlabState.ABSENT
        self._digest: bytes | None = None
        # Later fills are verified by XXH3-128, which takes a tenth of the time of SHA-256.
        self._checksum = b""  # XXH3-128 of the bytes that the digest covers
        # Hashes of the first `_hashed_bytes` bytes; no SHA-256 after the first fill.
        self._xxh3, self._hashed_bytes = xxhash.xxh3_128(layout.tag), 0
        self._sha256: _Hash | None = hashlib.sha256(layout.tag)
        # The hashes of the whole slab, computed by another thread.
        self._hashing: Future[_Digests] | None = None

    @property
    def state(self) -> SlabState:
        """Whether the slab is mapped, and whether its contents are verified."""
        return self._state

    @property
    def resident(self) -> bool:
        """Whether the parameters may be read."""
        return self._state is SlabState.RESIDENT

    @property
    def chunks(self) -> int:
        """Number of chunks that the slab occupies while it is mapped."""
        return self.reserved.chunks

    @property
    def digest(self) -> bytes:
        """SHA-256 of the slab's first contents."""
        assert self._digest is not None, f"{self.name} was never filled"
        return self._digest

    def views(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, as views of the slab's memory.

        The views stay valid and may be read while the slab is resident. A packed parameter has the
        shape of its panels.
        """
        return self._views

    def map(self, handles: Sequence[int] | Handles | None = None, *, cold: bool = False) -> None:
        """Map `handles` (None: free chunks) to the slab, which may then be filled and not read.

        `cold`: see `Arena.map`. Raises ArenaExhausted, and InvalidStage if the slab is mapped.
        """
        if self._state is not SlabState.ABSENT:
            raise InvalidStage(f"{self.name} is {self._state.value}; only drop it")
        chosen = self._arena.free_handles(self.chunks) if handles is None else handles
        if len(chosen) != self.chunks:
            raise ValueError(f"{self.name} needs {self.chunks} chunks, got {len(chosen)}")
        self._arena.map(self.reserved, 0, chosen, cold=cold)
        self._state = SlabState.FILLING
        self._restart_hash()

    def bytes_to_fill(self) -> torch.Tensor:
        """Return a writable view, uint8 [size_bytes], to fill the slab. Raises InvalidStage."""
        self._check_filling()
        self._restart_hash()
        return self._bytes

    def fill(
        self,
        offset_bytes: int,
        piece: torch.Tensor,
        write: Callable[[torch.Tensor], None] | None = None,
    ) -> Callable[[], None] | None:
        """Write a piece, uint8 [n], at an offset. Raises InvalidStage.

        `write` starts the copy of the piece instead. The result then updates the hash, before
        `finish` and before the next piece; it may be called by another thread. None: no update.
        """
        self._check_filling()
        # If the piece overwrites hashed bytes, hash again from the start.
        if offset_bytes < self._hashed_bytes or self._hashing is not None:
            self._restart_hash()
        end_bytes = offset_bytes + piece.numel()
        target = self._bytes[offset_bytes:end_bytes]
        if write is None:
            target[:] = piece
        else:
            write(target)
        # Hash pieces that arrive in order, so that the checksum is ready after the last piece;
        # `finish` hashes what is left.
        if offset_bytes != self._hashed_bytes:
            return None
        if write is None:
            self._hash(piece)
            return None
        self._hashed_bytes = end_bytes
        return partial(_update, [self._xxh3, self._sha256], piece)

    def hash_copy(self, copy: torch.Tensor, hashers: Executor) -> None:
        """Begin to hash a copy in host memory, which the slab is filled with."""
        self._check_filling()
        first = self._digest is None
        self._hashing = hashers.submit(_digests_of, copy, self.layout.tag, first=first)

    def bytes_to_read(self) -> torch.Tensor:
        """Return a view of the slab to send, uint8 [size_bytes]. Raises LayerNotResident."""
        self.check_resident()
        return self._bytes

    def fill_from(self, source: WeightSource, hashers: Executor | None = None) -> None:
        """Write all parameters and zero the padding. Raises InvalidStage, ModelError.

        With `hashers`, they begin to hash a copy of the bytes in host memory, so that `finish`
        reads nothing from the device.
        """
        filling = self.bytes_to_fill()
        if hashers is None or source.on_device:
            self._write_from(source, filling, self._views)
        if hashers is None:
            return
        if source.on_device:
            image = filling.cpu()
        else:
            image = torch.empty(self.layout.size_bytes, dtype=torch.uint8)
            flat = image.view(self.layout.dtype)
            places = self.layout.places.items()
            views = {name: self._view(flat, place) for name, place in places}
            self._write_from(source, image, views)
            filling.copy_(image)
        self.hash_copy(image, hashers)

    def _write_from(
        self, source: WeightSource, filling: torch.Tensor, views: dict[str, torch.Tensor]
    ) -> None:
        """Write parameters to `views`, and zeros to the padding between them in `filling`."""
        end_bytes = 0
        for name, place in self.layout.places.items():
            filling[end_bytes : place.offset_bytes] = 0
            end_bytes = place.offset_bytes + place.elements * self.layout.dtype.itemsize
            if place.in_panels:
                # Sources are row-major: read the weight into other memory and permute it.
                weight = torch.empty(place.shape, dtype=self.layout.dtype)
                source.fill(name, weight)
                views[name].copy_(panels.panels_of(weight))
            else:
                source.fill(name, views[name])

    def finish(self, max_bytes: int | None = None) -> bool:
        """Hash up to `max_bytes` more (None: all); returns whether the slab is resident now.

        The slab must not be written between two calls. Raises SlabCorrupted if the bytes differ
        from the first fill, and InvalidStage if the slab is not being filled.
        """
        self._check_filling()
        if self._hashing is not None:
            if max_bytes is not None and not self._hashing.done():
                return False
            digests = self._hashing.result()
        else:
            end = self.layout.size_bytes
            if max_bytes is not None:
                end = min(end, self._hashed_bytes + max_bytes)
            self._hash_up_to(end)
            if end < self.layout.size_bytes:
                return False
            sha256 = None if self._sha256 is None else self._sha256.digest()
            digests = _Digests(self._xxh3.digest(), sha256)
        checksum = digests.xxh3
        if digests.sha256 is not None:
            # The first fill defines the digest; all later fills must match it.
            self._digest, self._checksum = digests.sha256, checksum
        self._restart_hash()
        if checksum != self._checksum:
            raise SlabCorrupted(self.name)
        self._state = SlabState.RESIDENT
        return True

    def drop(self) -> None:
        """Free the memory in any state (see `Arena.retire`); no effect if absent."""
        if self._state is not SlabState.ABSENT:
            self._state = SlabState.ABSENT
            self._arena.retire(self.reserved, 0, self.chunks)

    def note_retired(self) -> None:
        """Mark the slab absent: `Arena.adopt` has retired its range."""
        self._state = SlabState.ABSENT

    def check_resident(self) -> None:
        """Raise LayerNotResident if the slab is not resident."""
        if self._state is not SlabState.RESIDENT:
            raise LayerNotResident(self.name)

    def _check_filling(self) -> None:
        if self._state is not SlabState.FILLING:
            raise InvalidStage(f"{self.name} is {self._state.value}; map it before it is filled")

    def _hash_up_to(self, end_bytes: int) -> None:
        self._hash(self._bytes[self._hashed_bytes : end_bytes])

    def _hash(self, piece: torch.Tensor) -> None:
        """Update the hashes with the next bytes of the slab."""
        _update([self._xxh3, self._sha256], piece.cpu())
        self._hashed_bytes += piece.numel()

    def _restart_hash(self) -> None:
        self._hashing = None
        tag, first = self.layout.tag, self._digest is None
        self._xxh3, self._hashed_bytes = xxhash.xxh3_128(tag), 0
        self._sha256 = hashlib.sha256(tag) if first else None

    def _view(self, flat: torch.Tensor, place: TensorPlace) -> torch.Tensor:
        start = place.offset_bytes // self.layout.dtype.itemsize
        shape = place.shape
        if place.in_panels:
            shape = panels.panel_shape(shape, self.layout.dtype)
        return flat[start : start + place.elements].view(shape)
