"""The arena (memory for parameters and KV) on an NVIDIA GPU: each chunk is a driver allocation.

A chunk can only be mapped whole, by a driver call of its own. Each costs the same: on an H200,
mapping a chunk, granting access and unmapping it take about 80 µs in all while kernels run, for
2 MiB as for 32 MiB (benchmarks/results/gpu-h200.json).
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.engine.memory.arena import (
    UNMAPPED,
    Arena,
    Handles,
    VirtualRange,
    coalesce,
)
from services.worker.engine.memory.device_copies import Fence
from services.worker.errors import DeviceError


def make_exportable(allows: Callable[[bool, bool], bool]) -> tuple[bool, bool]:
    """Choose how other processes and network cards may access memory: (descriptor, RDMA).

    Memory cannot be made accessible later. `allows` tries a choice. Without any, memory of the
    plain kind remains, whose errors `create` raises.
    """
    for shared, rdma in ((True, True), (True, False), (False, False)):
        if allows(shared, rdma):
            return shared, rdma
    return False, False


class VirtualMemory(Protocol):
    """The interface of `cuda_driver.CudaDriver`, which documents the methods."""

    granularity_bytes: int

    def create(self, size_bytes: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def reserve(self, size_bytes: int) -> int: ...
    def free(self, address: int, size_bytes: int) -> None: ...
    def map(self, address: int, size_bytes: int, handle: Any) -> None: ...
    def allow(self, address: int, size_bytes: int) -> None: ...
    def unmap(self, address: int, size_bytes: int) -> None: ...
    def wait(self) -> None: ...
    def tensor(self, address: int, size_bytes: int) -> torch.Tensor: ...


class CudaArena(Arena):
    """GPU memory as an arena; `chunk_bytes` is a multiple of the driver's granularity.

    `fence` returns a point after all kernels and copies so far: driver calls are not ordered with
    them, so retired chunks are unmapped only after that point. Raises DeviceError if the GPU has
    not enough memory.
    """

    slice_chunks_min = 8

    def __init__(
        self,
        driver: VirtualMemory,
        fence: Callable[[], Fence],
        *,
        chunk_bytes: int,
        total_chunks: int,
        maps_later: bool = True,
    ) -> None:
        if chunk_bytes <= 0 or chunk_bytes % driver.granularity_bytes:
            raise DeviceError(
                f"a chunk of {chunk_bytes} bytes cannot be mapped on this GPU; set 'chunk_bytes' to"
                f" a multiple of {driver.granularity_bytes >> 20}MiB, or leave it out"
            )
        super().__init__(chunk_bytes=chunk_bytes, total_chunks=total_chunks)
        # Allocate the whole budget now: later another process may have taken the memory.
        self.maps_later = maps_later
        self._driver = driver
        self._new_fence = fence
        self._fence = Fence()  # of the last chunks that were retired; the streams keep their order
        self._chunks: list[Any] = []
        try:
            for _ in range(total_chunks):
                self._chunks.append(driver.create(chunk_bytes))
        except DeviceError:
            self.close()
            raise

    def prefault(self, max_chunks: int | None = None) -> bool:
        """No effect: the driver creates the page-table entries with the mapping."""
        self._cold.clear()
        return True

    def adopt(self, freed: Sequence[VirtualRange]) -> None:
        super().adopt(freed)
        self._fence = self._new_fence()

    def retire(self, reserved: VirtualRange, chunk_offset: int, count: int) -> Handles:
        handles = super().retire(reserved, chunk_offset, count)
        if count:
            self._fence = self._new_fence()
        return handles

    def sweep(self, max_chunks: int | None = None) -> bool:
        # A slice never waits; the next turn tries again.
        if max_chunks is not None and self._retired and not self._fence.passed():
            return False
        self._fence.wait()
        return super().sweep(max_chunks)

    def await_retired(self) -> None:
        if self._retired:
            self._fence.wait()

    def tensor(self, reserved: VirtualRange, dtype: torch.dtype) -> torch.Tensor:
        return self._driver.tensor(reserved.address, reserved.size_bytes).view(dtype)

    def close(self) -> None:
        # Wait, because a kernel in flight may still access the ranges.
        if self._ranges:
            self._driver.wait()
        self.cancel_prepared()
        for reserved in self._ranges:
            mapped = np.flatnonzero(reserved.handles != UNMAPPED)
            for _, first, count in coalesce(mapped):
                address = reserved.address + first * self.chunk_bytes
                self._driver.unmap(address, count * self.chunk_bytes)
            self._driver.free(reserved.address, reserved.size_bytes)
            reserved.handles[:] = UNMAPPED
        for chunk in self._chunks:
            self._driver.release(chunk)
        for container in (self._ranges, self._retired, self._cold, self._prepared, self._chunks):
            container.clear()
        self._mapped[:] = False

    def _reserve_address(self, size_bytes: int) -> int:
        return self._driver.reserve(size_bytes)

    def _map_address(self, address: int, first_handle: int, count: int) -> None:
        size = self.chunk_bytes
        # Each chunk is its own driver allocation, so map them one by one.
        for place, chunk in enumerate(self._chunks[first_handle : first_handle + count]):
            self._driver.map(address + place * size, size, chunk)
        self._driver.allow(address, count * size)

    def _unmap_address(self, address: int, size_bytes: int) -> None:
        # Usually passed: callers of `map` and `prepare` wait before (`await_retired`).
        self._fence.wait()
        self._driver.unmap(address, size_bytes)

    def _prefault_address(self, address: int, size_bytes: int) -> None:
        """No effect; see `prefault`."""
