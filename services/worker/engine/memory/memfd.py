"""The arena (memory for parameters and KV) on a CPU: chunks are pages of a memory file (memfd).

Mapping pages of the file elsewhere moves memory between parameters and KV without a copy. A mapping
call takes about 5 µs. A newly mapped page has no page-table entry, so its first write faults:
measured 580 ms per GiB of first writes, against 95 ms per GiB of later ones.
"""

import ctypes
import errno
import mmap
import os
from typing import NoReturn

import torch

from services.worker.engine.memory.arena import UNMAPPED, Arena, VirtualRange

_PROT_NONE = 0
_PROT_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_SHARED = mmap.MAP_SHARED
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_READ = 22
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.restype = ctypes.c_int
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class MemfdArena(Arena):
    """Host memory as an arena; `chunk_bytes` is a multiple of the page size."""

    def __init__(self, *, chunk_bytes: int, total_chunks: int) -> None:
        if chunk_bytes <= 0 or chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"chunk_bytes must be a multiple of the page size {mmap.PAGESIZE}")
        super().__init__(chunk_bytes=chunk_bytes, total_chunks=total_chunks)
        self._file = os.memfd_create("tideserve-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._file, chunk_bytes * total_chunks)
        self._closed = False

    def tensor(self, reserved: VirtualRange, dtype: torch.dtype) -> torch.Tensor:
        buffer = (ctypes.c_char * reserved.size_bytes).from_address(reserved.address)
        return torch.frombuffer(buffer, dtype=dtype)

    def await_retired(self) -> None:
        """No effect: a processor's work has ended when its call returns."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for reserved in self._ranges:
            if _libc.munmap(reserved.address, reserved.size_bytes):
                _raise("munmap")
            reserved.handles[:] = UNMAPPED
        self._ranges.clear()
        self._retired.clear()
        self._cold.clear()
        self._prepared.clear()
        self._mapped[:] = False
        os.close(self._file)

    def _reserve_address(self, size_bytes: int) -> int:
        return _mmap(None, size_bytes, _PROT_NONE, _RESERVE, -1, 0)

    def _map_address(self, address: int, first_handle: int, count: int) -> None:
        _mmap(
            address,
            count * self.chunk_bytes,
            _PROT_READ_WRITE,
            _MAP_SHARED | _MAP_FIXED,
            self._file,
            first_handle * self.chunk_bytes,
        )

    def _unmap_address(self, address: int, size_bytes: int) -> None:
        # Map inaccessible memory over the interval, which keeps the address space reserved.
        _mmap(address, size_bytes, _PROT_NONE, _RESERVE | _MAP_FIXED, -1, 0)

    def _prefault_address(self, address: int, size_bytes: int) -> None:
        # MADV_POPULATE_READ creates the entries of 16 pages per fault, writable because the memory
        # is shared: 92 ms/GiB. MADV_POPULATE_WRITE and MAP_POPULATE fault every page: 340 ms/GiB.
        # Linux before 5.14 lacks the call (EINVAL); the first accesses are slow there.
        if _libc.madvise(address, size_bytes, _MADV_POPULATE_READ) and (
            ctypes.get_errno() != errno.EINVAL
        ):
            _raise("prefault")


def _mmap(
    address: int | None, size_bytes: int, protection: int, flags: int, file: int, offset_bytes: int
) -> int:
    """Call `mmap(2)`. Raises OSError, for example if `vm.max_map_count` is reached."""
    result: int | None = _libc.mmap(address, size_bytes, protection, flags, file, offset_bytes)
    if result is None or result == _MAP_FAILED:
        _raise(f"mmap of {size_bytes} bytes")
    return result


def _raise(what: str) -> NoReturn:
    """Raise the OSError of the libc call that just failed."""
    error = ctypes.get_errno()
    raise OSError(error, f"{what}: {os.strerror(error)}")
