"""CUDA's virtual memory management, emulated over pages of a memory file.

It refuses what an H200 refused (benchmarks/results/gpu-h200.json): to map over a mapping, to grant
access across a hole, to unmap part of a chunk. As there, memory without access crashes.
"""

from collections.abc import Callable, Iterator
from mmap import PAGESIZE

import torch

from services.worker.engine.memory.borrowed_memory import tensor_over
from services.worker.engine.memory.memfd import MemfdArena
from services.worker.errors import DeviceError

CHUNKS = 256


class FakeCudaDriver:
    """As `CudaDriver`; `chunks_max` is the device's memory in chunks."""

    def __init__(self, granularity_bytes: int = PAGESIZE, chunks_max: int = CHUNKS) -> None:
        self.granularity_bytes = granularity_bytes
        self._chunks_max = chunks_max
        self._file = MemfdArena(chunk_bytes=granularity_bytes, total_chunks=chunks_max)
        self.chunks: set[int] = set()
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        # Called to finish all copies.
        self.end_copies: Callable[[], None] = lambda: None
        # Called before unmapping; fails if a stream uses the memory.
        self.check_unused: Callable[[int, int], None] = lambda address, size_bytes: None

    def create(self, size_bytes: int) -> int:
        assert size_bytes == self.granularity_bytes
        if len(self.chunks) == self._chunks_max:
            raise DeviceError("the GPU is full")
        self.chunks.add(len(self.chunks))
        return len(self.chunks) - 1

    def release(self, handle: int) -> None:
        self.chunks.remove(handle)
        # An arena releases its chunks when it is closed.
        if not self.chunks:
            self._file.close()

    def reserve(self, size_bytes: int) -> int:
        address = self._file._reserve_address(size_bytes)
        self.reserved[address] = size_bytes
        return address

    def free(self, address: int, size_bytes: int) -> None:
        assert self.reserved.pop(address) == size_bytes
        assert not any(address <= chunk < address + size_bytes for chunk in self.mapped)

    def map(self, address: int, size_bytes: int, handle: int) -> None:
        assert size_bytes == self.granularity_bytes and handle in self.chunks
        assert any(first <= address < first + size for first, size in self.reserved.items())
        if address in self.mapped:
            raise DeviceError("cuMemMap failed with CUDA_ERROR_INVALID_VALUE")
        self.mapped[address] = handle

    def allow(self, address: int, size_bytes: int) -> None:
        for chunk in self._whole(address, size_bytes):
            self._file._map_address(chunk, self.mapped[chunk], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        self.check_unused(address, size_bytes)
        for chunk in self._whole(address, size_bytes):
            del self.mapped[chunk]
            self._file._unmap_address(chunk, self.granularity_bytes)

    def wait(self) -> None:
        self.end_copies()

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        return tensor_over(address, size_bytes, torch.device("cpu"))

    def _whole(self, address: int, size_bytes: int) -> Iterator[int]:
        """The chunks of a contiguous interval."""
        places = range(address, address + size_bytes, self.granularity_bytes)
        if size_bytes % self.granularity_bytes or not all(place in self.mapped for place in places):
            raise DeviceError("failed with CUDA_ERROR_INVALID_VALUE")
        yield from places
