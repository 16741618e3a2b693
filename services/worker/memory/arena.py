"""The contract of device memory: chunks that move between virtual ranges without a copy.

An arena owns the whole device budget as equal chunks of physical memory, named by *handles*
`0 .. total_chunks - 1`. A virtual range is reserved address space; mapping handles into it is the
only way in which memory gets a purpose, unmapping them the only way in which it loses one. A
handle is *free* while no range maps it, so free + mapped = total always holds.

A handle may be mapped twice: a drop maps parameter chunks into a KV tail first, lets the iteration
loop resume, and unmaps the old range later, which keeps the pause to the mapping itself.

What a CUDA backend must meet (through `cuda.bindings.driver`):

- a chunk is a multiple of `cuMemGetAllocationGranularity`; one `cuMemCreate` per chunk at start,
  exportable handles when peers share a host;
- `reserve` is `cuMemAddressReserve`; `map` is `cuMemMap` per handle and one `cuMemSetAccess` over
  the mapped interval; `unmap` is one `cuMemUnmap` over it; `close` is `cuMemRelease` and
  `cuMemAddressFree`;
- `unmap` and `close` wait until no kernel in flight can touch the interval;
- `tensor` wraps the reserved address once (DLPack), and stays valid while its tail is mapped.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from services.worker.errors import ArenaExhausted


@dataclass(eq=False, slots=True)
class VirtualRange:
    """Reserved address space, mapped chunk by chunk.

    `handles[i]` is the handle at chunk offset `i`, None where nothing is mapped: touching such a
    place is a crash.
    """

    name: str
    address: int
    chunk_bytes: int
    handles: list[int | None] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """Reserved bytes, mapped or not."""
        return len(self.handles) * self.chunk_bytes

    @property
    def mapped_chunks(self) -> int:
        """Chunks of the range with memory behind them."""
        return sum(handle is not None for handle in self.handles)


def coalesce(handles: Sequence[int]) -> list[tuple[int, int, int]]:
    """Group neighbouring handles: a list of (position in `handles`, first handle, count)."""
    runs: list[tuple[int, int, int]] = []
    for position, handle in enumerate(handles):
        if runs:
            start, first, count = runs[-1]
            if handle == first + count:
                runs[-1] = (start, first, count + 1)
                continue
        runs.append((position, handle, 1))
    return runs


class Arena(ABC):
    """Owns the device budget; backends supply the four operations on address space."""

    def __init__(self, *, chunk_bytes: int, total_chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.total_chunks = total_chunks
        self._ranges: list[VirtualRange] = []
        self._mappings = [0] * total_chunks
        self._free = set(range(total_chunks))

    @property
    def free_chunks(self) -> int:
        """Chunks that no range maps."""
        return len(self._free)

    def free_handles(self, count: int) -> list[int]:
        """The `count` lowest free handles, sorted; they stay free until they are mapped.

        Raises ArenaExhausted.
        """
        if count > len(self._free):
            raise ArenaExhausted(requested_chunks=count, free_chunks=len(self._free))
        return sorted(self._free)[:count]

    def reserve(self, name: str, size_bytes: int) -> VirtualRange:
        """Reserve address space of at least `size_bytes`, rounded up to chunks."""
        chunks = -(-size_bytes // self.chunk_bytes)
        address = self._reserve_address(chunks * self.chunk_bytes)
        reserved = VirtualRange(name, address, self.chunk_bytes, [None] * chunks)
        self._ranges.append(reserved)
        return reserved

    def map(self, reserved: VirtualRange, chunk_offset: int, handles: Sequence[int]) -> None:
        """Map sorted `handles` at `chunk_offset`; the place must be unmapped.

        Neighbouring handles become one call. Raises ValueError on a bad argument.
        """
        place = reserved.handles[chunk_offset : chunk_offset + len(handles)]
        free_place = len(place) == len(handles) and all(handle is None for handle in place)
        if chunk_offset < 0 or not free_place:
            raise ValueError(f"{reserved.name}: chunks at {chunk_offset} are mapped or outside")
        if any(not 0 <= handle < self.total_chunks for handle in handles):
            raise ValueError(f"{reserved.name}: a handle is outside the arena")
        for position, first, count in coalesce(handles):
            offset_bytes = (chunk_offset + position) * self.chunk_bytes
            self._map_address(reserved.address + offset_bytes, first, count)
        reserved.handles[chunk_offset : chunk_offset + len(handles)] = handles
        for handle in handles:
            self._mappings[handle] += 1
        self._free.difference_update(handles)

    def unmap(self, reserved: VirtualRange, chunk_offset: int, count: int) -> list[int]:
        """Unmap `count` chunks; returns their handles, free unless another range maps them."""
        place = reserved.handles[chunk_offset : chunk_offset + count]
        handles = [handle for handle in place if handle is not None]
        if chunk_offset < 0 or len(handles) != count:
            raise ValueError(f"{reserved.name}: chunks at {chunk_offset} are not all mapped")
        if count == 0:
            return []
        address = reserved.address + chunk_offset * self.chunk_bytes
        self._unmap_address(address, count * self.chunk_bytes)
        reserved.handles[chunk_offset : chunk_offset + count] = [None] * count
        for handle in handles:
            self._mappings[handle] -= 1
            if self._mappings[handle] == 0:
                self._free.add(handle)
        return handles

    @abstractmethod
    def tensor(self, reserved: VirtualRange, dtype: torch.dtype) -> torch.Tensor:
        """One flat tensor over the whole reserved range.

        It keeps working as chunks are mapped and unmapped; touching an unmapped place, or the
        tensor after `close`, is a crash.
        """

    @abstractmethod
    def close(self) -> None:
        """Give all memory and address space back. Idempotent."""

    def check_invariants(self) -> None:
        """Free + mapped = total, and the ranges agree with the count of mappings."""
        mappings = [0] * self.total_chunks
        for reserved in self._ranges:
            for handle in reserved.handles:
                if handle is not None:
                    mappings[handle] += 1
        assert mappings == self._mappings, "the ranges disagree with the mapping counts"
        mapped = {handle for handle, count in enumerate(mappings) if count}
        assert not mapped & self._free, "a free chunk is mapped"
        assert len(mapped) + len(self._free) == self.total_chunks, "a chunk is lost"

    @abstractmethod
    def _reserve_address(self, size_bytes: int) -> int:
        """Reserve inaccessible address space; returns its address."""

    @abstractmethod
    def _map_address(self, address: int, first_handle: int, count: int) -> None:
        """Put `count` consecutive chunks at `address`."""

    @abstractmethod
    def _unmap_address(self, address: int, size_bytes: int) -> None:
        """Make an interval inaccessible again; its address space stays reserved."""
