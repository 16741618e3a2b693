"""The host store: KV blocks in host memory, in slots of all layers.

Layout: [slot][layer][2, token, kv_head, head_dim], so a block is contiguous. The store is one
anonymous mapping of its whole capacity. Its pages are backed by memory in steps, by the thread of
the copier: a start takes no time, and memory that is never needed stays free. A GPU copies through
pinned slots (`PieceCopies`), so these pages are not pinned.
"""

import ctypes
import errno
import mmap
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import psutil
import xxhash

from services.worker.errors import WorkerError

Bytes = npt.NDArray[np.uint8]
STEP_BYTES = 64 << 20
STEP_SLOTS = 64
"""Least number of slots per step, two jobs of the copier."""
SLICE_BYTES = 2 << 20
"""Memory that is backed at a time: mapping calls of the arena wait for the slice."""
SPARE_BYTES = 256 << 20
"""Memory that stays available on this machine after a step."""
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23

# `mmap.madvise` would hold the interpreter's lock.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostMemoryError(WorkerError):
    """The host has no memory for the store."""


def available_bytes() -> int:
    """Memory of this machine that processes can allocate without swapping."""
    return int(psutil.virtual_memory().available)


class HostStore:
    """`slots` blocks of `num_layers` × `layer_bytes` bytes, within `capacity_bytes`.

    `slots` grows up to `slots_max`. Only the copier's thread uses the store, but for the counts.
    """

    def __init__(
        self,
        num_layers: int,
        layer_bytes: int,
        capacity_bytes: int,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """Reserve address space.

        Raises:
            HostMemoryError: if the capacity is below a block, or the system refuses the mapping.
        """
        self.layer_bytes = layer_bytes
        self.slot_bytes = num_layers * layer_bytes
        self.slots_max = capacity_bytes // self.slot_bytes
        self.slots = 0
        if not self.slots_max:
            raise HostMemoryError(
                f"'host_memory' is {capacity_bytes} bytes, but a KV block of all layers has"
                f" {self.slot_bytes}; set it to room for many blocks, or to 0"
            )
        self._available = available
        self._step = min(self.slots_max, max(STEP_BYTES // self.slot_bytes, STEP_SLOTS))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            mapping = mmap.mmap(-1, self.slots_max * self.slot_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"the system refuses to map {capacity_bytes >> 20} MiB for 'host_memory' ({error});"
                " lower it"
            ) from error
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._blocks = self._bytes.reshape(self.slots_max, num_layers, layer_bytes)
        self._sums = np.zeros(self.slots_max, np.uint64)

    @property
    def step_slots(self) -> int:
        """Number of slots that a step adds."""
        return self._step

    @property
    def backed_bytes(self) -> int:
        """Memory of the store so far."""
        return self.slots * self.slot_bytes

    def grow(self) -> int:
        """Back the next step with memory; returns the number of slots.

        Raises:
            HostMemoryError: if the machine has too little memory; the store stays as it is.
        """
        slots = min(self.slots + self._step, self.slots_max)
        first, end = self.backed_bytes, slots * self.slot_bytes
        free_bytes = self._available()
        if free_bytes < end - first + SPARE_BYTES:
            raise HostMemoryError(
                f"host copies stay at {first >> 20} MiB of 'host_memory': only {free_bytes >> 20}"
                " MiB are available on this machine"
            )
        for start in range(first, end, SLICE_BYTES):
            self._populate(start, min(start + SLICE_BYTES, end))
        self.slots = slots
        return slots

    def _populate(self, start: int, end: int) -> None:
        """Back these bytes, and the rest of their pages, with memory."""
        first = start - start % mmap.PAGESIZE
        size_bytes = end - first
        if not _libc.madvise(self._bytes.ctypes.data + first, size_bytes, _MADV_POPULATE_WRITE):
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise HostMemoryError(
                f"host copies stay at {self.backed_bytes >> 20} MiB of 'host_memory': the system"
                f" provides no more ({errno.errorcode.get(code, code)})"
            )
        # Before Linux 5.14: touch the pages. The slots there are empty.
        self._bytes[start:end] = 0

    def write(self, layer: int, slots: Sequence[int], rows: Bytes) -> None:
        """Store a layer of blocks, [slot, layer_bytes]."""
        for slot, row in zip(slots, rows, strict=True):
            self._blocks[slot, layer] = row

    def read(self, layer: int, slots: Sequence[int], rows: Bytes) -> None:
        """Copy a layer of blocks to `rows`, [slot, layer_bytes]."""
        for slot, row in zip(slots, rows, strict=True):
            row[:] = self._blocks[slot, layer]

    def seal(self, slot: int) -> None:
        """Note the checksum of a block whose layers are all stored."""
        self._sums[slot] = self._sum(slot)

    def is_intact(self, slot: int) -> bool:
        """Whether a block has the checksum of its `seal`."""
        return bool(self._sums[slot] == self._sum(slot))

    def sealed_sum(self, slot: int) -> int:
        """The checksum of a block at its `seal`."""
        return int(self._sums[slot])

    def current_sum(self, slot: int) -> int:
        """The checksum that a block has now."""
        return int(self._sum(slot))

    def _sum(self, slot: int) -> np.uint64:
        return np.uint64(xxhash.xxh3_64_intdigest(self._blocks[slot].data))
