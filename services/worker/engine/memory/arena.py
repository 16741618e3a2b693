"""Device memory as chunks that move between virtual address ranges without a copy.

An arena owns the whole device budget as equal chunks of physical memory, named by *handles*
`0 .. total_chunks - 1`. A virtual range is reserved address space. Mapping a handle into a range
makes its chunk usable there. A *place* is a series of consecutive chunks of a range. A handle is
either free or owned by exactly one place, so free + mapped = total always holds.

Unmapping touched memory is slow, and a drop of parameters must not wait for it. A place is
therefore *retired* first, without a system call: its handles are free and may be mapped elsewhere.
`sweep` removes the old mapping later, in slices; until then it must not be accessed.

Mapping is slow, too, so the places that a planned drop will enlarge can be *prepared*: handles
still in use elsewhere are mapped there a second time and prefaulted (page-table entries exist).
After the handles become free, `adopt` transfers them to the prepared places without a system call.
Until then a prepared place must not be accessed.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from services.worker.errors import ArenaExhausted

Handles = npt.NDArray[np.int64]
# States of a chunk of a range that owns no handle.
UNMAPPED = -1
RETIRED = -2  # mapped until `sweep`, but the handle is free
PREPARED = -3  # mapped, but the handle belongs to another place until `adopt`


@dataclass(eq=False, slots=True)
class VirtualRange:
    """Reserved address space, mapped chunk by chunk.

    `handles[i]` is the handle at chunk offset `i`, or a negative state. An access to an `UNMAPPED`
    chunk crashes; a write to a `RETIRED` or `PREPARED` chunk corrupts the data of another place.
    """

    name: str
    address: int
    chunk_bytes: int
    chunks: int
    handles: Handles = field(init=False)

    def __post_init__(self) -> None:
        self.handles = np.full(self.chunks, UNMAPPED, dtype=np.int64)

    @property
    def size_bytes(self) -> int:
        """Reserved bytes, mapped or not."""
        return self.chunks * self.chunk_bytes

    @property
    def mapped_chunks(self) -> int:
        """Number of chunks that the range owns."""
        return int(np.count_nonzero(self.handles >= 0))


@dataclass(frozen=True, slots=True)
class _Place:
    """Consecutive chunks of a range."""

    reserved: VirtualRange
    offset: int
    count: int

    @property
    def window(self) -> Handles:
        """A writable view of the range's handles at this place."""
        return self.reserved.handles[self.offset : self.offset + self.count]


def coalesce(handles: Sequence[int] | Handles) -> list[tuple[int, int, int]]:
    """Group consecutive handles into runs: (position in `handles`, first handle, count)."""
    values = np.asarray(handles, dtype=np.int64)
    if not len(values):
        return []
    breaks = np.flatnonzero(values[1:] - values[:-1] != 1) + 1
    bounds = [0, *breaks.tolist(), len(values)]
    return [(start, int(values[start]), end - start) for start, end in pairwise(bounds)]


class Arena(ABC):
    """Owns the physical memory of the budget; subclasses implement the system calls."""

    slice_chunks_min = 1
    """Minimum number of chunks per slice of background work (`map_prepared`, `sweep`, …)."""
    maps_later = False
    """Whether mapping is so slow that `prepare` leaves it to `map_prepared`."""

    def __init__(self, *, chunk_bytes: int, total_chunks: int) -> None:
        self.chunk_bytes = chunk_bytes
        self.total_chunks = total_chunks
        self._ranges: list[VirtualRange] = []
        # For each handle, whether a place owns it.
        self._mapped = np.zeros(total_chunks, dtype=np.bool_)
        # Places that wait for `sweep` and for `prefault`, oldest first.
        self._retired: deque[_Place] = deque()
        self._cold: deque[_Place] = deque()
        # Prepared places with the handles that `adopt` will transfer to them.
        self._prepared: list[tuple[_Place, Handles]] = []
        # The parts of prepared places that are not mapped yet.
        self._unmapped: deque[tuple[_Place, Handles]] = deque()

    @property
    def free_chunks(self) -> int:
        """Number of chunks without an owner."""
        return self.total_chunks - int(np.count_nonzero(self._mapped))

    @property
    def retired_chunks(self) -> int:
        """Number of retired chunks that `sweep` has not unmapped yet."""
        return sum(int(np.count_nonzero(reserved.handles == RETIRED)) for reserved in self._ranges)

    def free_handles(self, count: int, also_free: Handles | None = None) -> Handles:
        """Select `count` sorted handles that are free or in `also_free`, without claiming them.

        Raises ArenaExhausted.
        """
        available = ~self._mapped
        if also_free is not None:
            available[also_free] = True
        free = np.flatnonzero(available)
        if count > len(free):
            raise ArenaExhausted(requested_chunks=count, free_chunks=len(free))
        # First fit: take the lowest run that is long enough, because a run needs a single mapping
        # call. This keeps the number of mappings small as memory moves back and forth.
        for position, _, run in coalesce(free):
            if run >= count:
                return free[position : position + count]
        return free[:count]

    def reserve(self, name: str, size_bytes: int) -> VirtualRange:
        """Reserve address space of at least `size_bytes`, rounded up to chunks."""
        chunks = -(-size_bytes // self.chunk_bytes)
        address = self._reserve_address(chunks * self.chunk_bytes)
        reserved = VirtualRange(name, address, self.chunk_bytes, chunks)
        self._ranges.append(reserved)
        return reserved

    def map(
        self,
        reserved: VirtualRange,
        chunk_offset: int,
        handles: Sequence[int] | Handles,
        *,
        cold: bool = False,
    ) -> int:
        """Map free, sorted `handles` at `chunk_offset`; returns the number of mapping calls.

        The place must be unmapped or retired. A run of consecutive handles takes a single call.
        `cold`: queue the place for `prefault`. Raises ValueError on a bad argument.
        """
        wanted = np.asarray(handles, dtype=np.int64)
        place = _Place(reserved, chunk_offset, len(wanted))
        runs = self._runs(place, wanted)
        if self._mapped[wanted].any():
            raise ValueError(f"{reserved.name}: a handle is mapped elsewhere")
        self._map_runs(place, runs)
        self._mapped[wanted] = True
        place.window[:] = wanted
        if cold:
            self._cold.append(place)
        return len(runs)

    def prepare(
        self, reserved: VirtualRange, chunk_offset: int, handles: Sequence[int] | Handles
    ) -> int:
        """Map sorted `handles`, free or owned elsewhere, for a later `adopt`.

        Returns the number of mapping calls; 0 if `map_prepared` makes them. The place must be
        unmapped or retired, and is queued for `prefault`. Raises ValueError on a bad argument.
        """
        wanted = np.asarray(handles, dtype=np.int64)
        place = _Place(reserved, chunk_offset, len(wanted))
        runs = self._runs(place, wanted)
        if self.maps_later:
            self._make_unmapped(place)
            self._unmapped.append((place, wanted))
            runs = []
        else:
            self._map_runs(place, runs)
        place.window[:] = PREPARED
        self._prepared.append((place, wanted))
        self._cold.append(place)
        return len(runs)

    @property
    def unmapped_chunks(self) -> int:
        """Number of prepared chunks that `map_prepared` has not mapped yet."""
        return sum(place.count for place, _ in self._unmapped)

    def map_prepared(self, max_chunks: int | None = None) -> bool:
        """Map up to `max_chunks` prepared chunks (None: all); returns True when all are mapped."""
        left = self.unmapped_chunks if max_chunks is None else max_chunks
        while self._unmapped and left > 0:
            place, handles = self._unmapped[0]
            count = min(place.count, left)
            self._map_runs(_Place(place.reserved, place.offset, count), coalesce(handles[:count]))
            self._unmapped.popleft()
            if count < place.count:
                rest = _Place(place.reserved, place.offset + count, place.count - count)
                self._unmapped.appendleft((rest, handles[count:]))
            left -= count
        return not self._unmapped

    def adopt(self, freed: Sequence[VirtualRange]) -> None:
        """Retire the fully mapped ranges `freed` and transfer handles to all prepared places.

        First maps what `map_prepared` has not mapped.

        Raises ValueError, without any effect, if a handle is not free or two places claim it.
        """
        # Iterations wait for this method during a drop, so it only updates tables, without system
        # calls. Validate on a copy, so that a failure leaves the arena unchanged.
        mapped = self._mapped.copy()
        for reserved in freed:
            mapped[reserved.handles] = False
        before = np.count_nonzero(mapped)
        for _, handles in self._prepared:
            mapped[handles] = True
        grown = sum(place.count for place, _ in self._prepared)
        # If fewer handles are newly mapped than chunks were prepared, a handle was claimed twice.
        if np.count_nonzero(mapped) != before + grown:
            raise ValueError("a prepared place claims a handle that another place owns")
        self.map_prepared()
        self._mapped = mapped
        for reserved in freed:
            reserved.handles[:] = RETIRED
            self._retired.append(_Place(reserved, 0, reserved.chunks))
        for place, handles in self._prepared:
            place.window[:] = handles
        self._prepared.clear()

    def cancel_prepared(self) -> None:
        """Retire all prepared places; `sweep` unmaps them."""
        for place, _ in self._prepared:
            place.window[:] = RETIRED
            self._retired.append(place)
        for place, _ in self._unmapped:
            place.window[:] = UNMAPPED
        self._prepared.clear()
        self._unmapped.clear()

    def retire(self, reserved: VirtualRange, chunk_offset: int, count: int) -> Handles:
        """Free `count` chunks and return their handles; `sweep` unmaps the chunks later.

        Raises ValueError if a chunk is not mapped.
        """
        place = slice(chunk_offset, chunk_offset + count)
        handles = reserved.handles[place].copy()
        if not count:
            return handles
        if chunk_offset < 0 or len(handles) != count or handles.min() < 0:
            raise ValueError(f"{reserved.name}: chunks at {chunk_offset} are not all mapped")
        reserved.handles[place] = RETIRED
        self._mapped[handles] = False
        self._retired.append(_Place(reserved, chunk_offset, count))
        return handles

    def sweep(self, max_chunks: int | None = None) -> bool:
        """Unmap up to `max_chunks` retired chunks (None: all); returns True when all are unmapped.

        Takes 30-50 ms per GiB of touched memory on a CPU.
        """
        return self._process(self._retired, self._sweep_place, max_chunks)

    def prefault(self, max_chunks: int | None = None) -> bool:
        """Create page-table entries for up to `max_chunks` chunks (None: all) that lack them.

        Returns True when no place waits. The contents do not change.
        """
        return self._process(self._cold, self._prefault_place, max_chunks)

    @abstractmethod
    def tensor(self, reserved: VirtualRange, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over the whole reserved range.

        It stays valid as chunks are mapped and unmapped. An access to an unmapped chunk, or after
        `close`, crashes.
        """

    @abstractmethod
    def await_retired(self) -> None:
        """Block until no kernel or copy uses retired chunks, so that other chunks can be mapped."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory and address space. Idempotent."""

    def check_invariants(self) -> None:
        """Assert that each handle has one owner, and retired and prepared chunks are queued."""
        mapped = [reserved.handles[reserved.handles >= 0] for reserved in self._ranges]
        counts = np.bincount(
            np.concatenate([*mapped, np.empty(0, np.int64)]), minlength=self.total_chunks
        )
        assert (counts <= 1).all(), "a handle is mapped twice"
        assert (counts.astype(np.bool_) == self._mapped).all(), "the ranges disagree with the arena"
        queued = {
            (id(place.reserved), offset)
            for place in self._retired
            for offset in range(place.offset, place.offset + place.count)
        }
        for reserved in self._ranges:
            for offset in np.flatnonzero(reserved.handles == RETIRED).tolist():
                assert (id(reserved), offset) in queued, (
                    f"{reserved.name}: {offset} will not be swept"
                )
        prepared = sum(
            int(np.count_nonzero(reserved.handles == PREPARED)) for reserved in self._ranges
        )
        assert prepared == sum(place.count for place, _ in self._prepared), (
            "a prepared place is lost"
        )

    @abstractmethod
    def _reserve_address(self, size_bytes: int) -> int:
        """Reserve inaccessible address space; returns its address."""

    @abstractmethod
    def _map_address(self, address: int, first_handle: int, count: int) -> None:
        """Map `count` chunks from `first_handle` on at `address`."""

    @abstractmethod
    def _unmap_address(self, address: int, size_bytes: int) -> None:
        """Unmap an interval; its address space stays reserved."""

    @abstractmethod
    def _prefault_address(self, address: int, size_bytes: int) -> None:
        """Create the page-table entries of a mapped interval ahead of its first accesses."""

    def _runs(self, place: _Place, wanted: Handles) -> list[tuple[int, int, int]]:
        """Return `coalesce(wanted)`. Raises ValueError if they cannot be mapped at the place."""
        name = place.reserved.name
        if not 0 <= place.offset <= place.reserved.chunks - place.count:
            raise ValueError(f"{name}: chunks at {place.offset} are outside the range")
        if not place.count:
            return []
        present = place.window
        if present.max() >= 0 or present.min() == PREPARED:
            raise ValueError(f"{name}: chunks at {place.offset} are mapped")
        if wanted[0] < 0 or wanted[-1] >= self.total_chunks or (np.diff(wanted) <= 0).any():
            raise ValueError(f"{name}: a handle is outside the arena or out of order")
        return coalesce(wanted)

    def _map_runs(self, place: _Place, runs: Sequence[tuple[int, int, int]]) -> None:
        """Map runs of handles at an unmapped or retired place."""
        self._make_unmapped(place)
        for position, first, count in runs:
            offset_bytes = (place.offset + position) * self.chunk_bytes
            self._map_address(place.reserved.address + offset_bytes, first, count)

    def _make_unmapped(self, place: _Place) -> None:
        """Unmap the retired chunks of a place; on a GPU, mapping requires it."""
        if place.count and (place.window == RETIRED).any():
            self._sweep_place(place)

    def _sweep_place(self, place: _Place) -> None:
        """Unmap the retired chunks of a place."""
        # Skip chunks that were mapped again after they were queued.
        retired = place.window == RETIRED
        self._apply_to_runs(self._unmap_address, place, retired)
        place.window[retired] = UNMAPPED

    def _prefault_place(self, place: _Place) -> None:
        """Prefault the chunks of a place, except those that were retired meanwhile."""
        window = place.window
        self._apply_to_runs(self._prefault_address, place, (window >= 0) | (window == PREPARED))

    def _apply_to_runs(
        self, operation: Callable[[int, int], None], place: _Place, chosen: npt.NDArray[np.bool_]
    ) -> None:
        """Call `operation(address, size_bytes)` for each run of `chosen` chunks of a place."""
        for _, first, count in coalesce(place.offset + np.flatnonzero(chosen)):
            address = place.reserved.address + first * self.chunk_bytes
            operation(address, count * self.chunk_bytes)

    @staticmethod
    def _process(
        places: deque[_Place], apply: Callable[[_Place], None], max_chunks: int | None
    ) -> bool:
        """Apply a function to up to `max_chunks` queued chunks; returns True when none is left."""
        left = max_chunks
        while places and (left is None or left > 0):
            place = places.popleft()
            count = place.count if left is None else min(place.count, left)
            apply(_Place(place.reserved, place.offset, count))
            if count < place.count:
                rest = _Place(place.reserved, place.offset + count, place.count - count)
                places.appendleft(rest)
            if left is not None:
                left -= count
        return not places
