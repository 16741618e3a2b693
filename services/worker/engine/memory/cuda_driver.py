"""Wraps CUDA's virtual memory management: physical chunks and reserved address space.

Import this module only where torch's CUDA build is installed, which brings `cuda.bindings`. Driver
calls are not ordered with kernels: unmap memory only when no kernel in flight may access it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from services.worker.engine.memory.borrowed_memory import tensor_over
from services.worker.engine.memory.cuda import make_exportable
from services.worker.errors import DeviceError

log = logging.getLogger(__name__)


class CudaDriver:
    """Chunks and address space of `device` (without an index: the first GPU).

    Only the thread that created the object may call it.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index or 0
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        # Make torch's primary context current; without it, calls of `driver` have no context.
        context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, index))
        call(driver.cuCtxSetCurrent, context)
        # Allocations are pinned to this device and accessible by its kernels, until they are
        # exported.
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        self._properties = properties
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        self.shared, self.rdma = make_exportable(self._allows)
        log.info("memory can be shared by descriptor: %s, by RDMA: %s", self.shared, self.rdma)
        self.granularity_bytes = self._granularity_bytes()

    def _granularity_bytes(self) -> int:
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(call(driver.cuMemGetAllocationGranularity, self._properties, least))

    def _allows(self, shared: bool, rdma: bool) -> bool:
        """Request memory with these properties from now on; returns whether the driver allows."""
        kinds = driver.CUmemAllocationHandleType
        self._properties.requestedHandleTypes = (
            kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            if shared
            else kinds.CU_MEM_HANDLE_TYPE_NONE
        )
        self._properties.allocFlags.gpuDirectRDMACapable = int(rdma)
        try:
            size_bytes = self._granularity_bytes()
            self.release(self.create(size_bytes))
        except DeviceError as error:
            log.debug("memory (shared: %s, RDMA: %s) is refused: %s", shared, rdma, error)
            return False
        return True

    def check_room(self, needed_bytes: int) -> None:
        """Raise DeviceError if the GPU has less than `needed_bytes` of free memory."""
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.device)
        if free_bytes < needed_bytes:
            raise DeviceError(
                f"'memory' asks for {needed_bytes >> 20} MiB, but the GPU has {free_bytes >> 20} of"
                f" {all_bytes >> 20} MiB free; lower it, or stop other processes on the GPU"
                " (nvidia-smi lists them)"
            )

    def create(self, size_bytes: int) -> Any:
        """Allocate physical memory, a multiple of `granularity_bytes`. Raises DeviceError."""
        return call(driver.cuMemCreate, size_bytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        """Free memory from `create`; unmap it first."""
        call(driver.cuMemRelease, handle)

    def reserve(self, size_bytes: int) -> int:
        """Reserve address space and return its address. Raises DeviceError."""
        return int(call(driver.cuMemAddressReserve, size_bytes, 0, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        """Release address space from `reserve`; unmap it first."""
        call(driver.cuMemAddressFree, address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        """Map a whole chunk at an unmapped address; a chunk may have several mappings."""
        call(driver.cuMemMap, address, size_bytes, 0, handle, 0)

    def allow(self, address: int, size_bytes: int) -> None:
        """Allow kernels to read and write an interval that is mapped without gaps."""
        call(driver.cuMemSetAccess, address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap an interval of whole chunks that is mapped without gaps."""
        call(driver.cuMemUnmap, address, size_bytes)

    def wait(self) -> None:
        """Block until all kernels launched so far have completed."""
        torch.cuda.synchronize(self.device)

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor over address space, mapped or not."""
        return tensor_over(address, size_bytes, self.device)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a driver function and return its value. Raises DeviceError."""
    code, *values = function(*arguments)
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        raise DeviceError(
            f"{function.__name__}: the GPU is full: {free_bytes >> 20} of {all_bytes >> 20} MiB are"
            " free; lower 'memory', or stop other processes on the GPU (nvidia-smi lists them)"
        )
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{function.__name__} failed with {code.name}; see the driver's log")
    return values[0] if values else None
