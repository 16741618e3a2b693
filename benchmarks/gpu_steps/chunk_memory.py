"""Physical chunks that another process can import, on a GPU or as memory files for a rehearsal.

Handles of the driver can be exported only if they were created for it, so `create` takes whether to
set both flags: file descriptors, and registration with a network adapter.
"""

import ctypes
import mmap
import os
from typing import Any, Protocol

import torch

from services.worker.engine.memory.borrowed_memory import tensor_over

_FIXED, _NORESERVE, _NONE = 0x10, 0x4000, 0
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE


class ChunkMemory(Protocol):
    """Chunks of `chunk_bytes`; addresses are device addresses."""

    chunk_bytes: int

    def create(self, *, exportable: bool) -> Any: ...
    def export(self, handle: Any) -> int: ...
    def take(self, descriptor: int) -> Any: ...
    def release(self, handle: Any) -> None: ...
    def reserve(self, chunks: int) -> int: ...
    def map(self, address: int, handle: Any) -> None: ...
    def allow(self, address: int, chunks: int) -> None: ...
    def unmap(self, address: int, chunks: int) -> None: ...
    def tensor(self, address: int, chunks: int) -> torch.Tensor: ...
    def free_bytes(self) -> int: ...
    def wait(self) -> None: ...


class CudaChunks:
    """Driver allocations of the first GPU. Raises DeviceError."""

    def __init__(self, chunk_bytes: int) -> None:
        from cuda.bindings import driver

        from services.worker.engine.memory.cuda_driver import CudaDriver, call

        self.chunk_bytes = chunk_bytes
        self._call, self._driver = call, driver
        self._plain = CudaDriver(torch.device("cuda", 0))
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = 0
        properties.requestedHandleTypes = self._kind
        properties.allocFlags.gpuDirectRDMACapable = 1
        self._exportable = properties

    def create(self, *, exportable: bool) -> Any:
        if not exportable:
            return self._plain.create(self.chunk_bytes)
        return self._call(self._driver.cuMemCreate, self.chunk_bytes, self._exportable, 0)

    def export(self, handle: Any) -> int:
        """A file descriptor, which the caller closes."""
        return int(self._call(self._driver.cuMemExportToShareableHandle, handle, self._kind, 0))

    def take(self, descriptor: int) -> Any:
        """The handle of another process's chunk; closes the descriptor."""
        try:
            return self._call(self._driver.cuMemImportFromShareableHandle, descriptor, self._kind)
        finally:
            os.close(descriptor)

    def release(self, handle: Any) -> None:
        self._plain.release(handle)

    def reserve(self, chunks: int) -> int:
        return self._plain.reserve(chunks * self.chunk_bytes)

    def map(self, address: int, handle: Any) -> None:
        self._plain.map(address, self.chunk_bytes, handle)

    def allow(self, address: int, chunks: int) -> None:
        self._plain.allow(address, chunks * self.chunk_bytes)

    def unmap(self, address: int, chunks: int) -> None:
        self._plain.unmap(address, chunks * self.chunk_bytes)

    def tensor(self, address: int, chunks: int) -> torch.Tensor:
        return self._plain.tensor(address, chunks * self.chunk_bytes)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def wait(self) -> None:
        self._plain.wait()


class FileChunks:
    """Memory files instead of driver allocations: the same calls in the same order, on a CPU."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
            ctypes.c_long,
        ]

    def create(self, *, exportable: bool) -> int:
        """A memory file, which can always be exported."""
        descriptor = os.memfd_create("chunk", os.MFD_CLOEXEC if exportable else 0)
        os.ftruncate(descriptor, self.chunk_bytes)
        return descriptor

    def export(self, handle: int) -> int:
        return os.dup(handle)

    def take(self, descriptor: int) -> int:
        return descriptor

    def release(self, handle: int) -> None:
        os.close(handle)

    def reserve(self, chunks: int) -> int:
        return self._mmap(None, chunks, _NONE, _RESERVE, -1)

    def map(self, address: int, handle: int) -> None:
        self._mmap(address, 1, _READ_WRITE, mmap.MAP_SHARED | _FIXED, handle)

    def allow(self, address: int, chunks: int) -> None:
        """No effect: a mapping can be accessed."""

    def unmap(self, address: int, chunks: int) -> None:
        self._mmap(address, chunks, _NONE, _RESERVE | _FIXED, -1)

    def tensor(self, address: int, chunks: int) -> torch.Tensor:
        return tensor_over(address, chunks * self.chunk_bytes, torch.device("cpu"))

    def free_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE

    def wait(self) -> None:
        """No effect: calls are synchronous."""

    def _mmap(self, at: int | None, chunks: int, access: int, flags: int, descriptor: int) -> int:
        address = self._libc.mmap(at, chunks * self.chunk_bytes, access, flags, descriptor, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap failed")
        return int(address)


_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
