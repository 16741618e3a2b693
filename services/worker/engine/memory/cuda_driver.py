"""The virtual memory management of CUDA's driver on one GPU: physical chunks and address space.

`cuda.bindings` comes with torch's build for CUDA. To import this needs it, so only a worker on a
GPU does. Calls are not ordered with kernels: `wait` first where one in flight may use a mapping.
"""

from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from services.worker.engine.memory.borrowed_memory import tensor_over
from services.worker.errors import DeviceError


class CudaDriver:
    """Chunks and address space of `device`, the first GPU if it has no number.

    It is for the thread that made it.
    """

    def __init__(self, device: torch.device) -> None:
        index = device.index or 0
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)
        # The context of torch; without this call, those of `driver` have none.
        context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, index))
        call(driver.cuCtxSetCurrent, context)
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = index
        self._properties = properties
        access = driver.CUmemAccessDesc()
        access.location = properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = access
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity_bytes: int = call(driver.cuMemGetAllocationGranularity, properties, least)

    def check_room(self, needed_bytes: int) -> None:
        """Raise DeviceError unless the GPU has so much free memory."""
        free_bytes, all_bytes = torch.cuda.mem_get_info(self.device)
        if free_bytes < needed_bytes:
            raise DeviceError(
                f"'memory' asks for {needed_bytes >> 20} MiB, but the GPU has {free_bytes >> 20} of"
                f" {all_bytes >> 20} MiB free; lower it, or end what else runs there (nvidia-smi"
                " shows it)"
            )

    def create(self, size_bytes: int) -> Any:
        """Physical memory of a multiple of `granularity_bytes`. Raises DeviceError."""
        return call(driver.cuMemCreate, size_bytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        """Free what `create` has made, once nothing maps it."""
        call(driver.cuMemRelease, handle)

    def reserve(self, size_bytes: int) -> int:
        """Address space without memory. Raises DeviceError."""
        return int(call(driver.cuMemAddressReserve, size_bytes, 0, 0, 0))

    def free(self, address: int, size_bytes: int) -> None:
        """Give back what `reserve` has returned; nothing may be mapped in it."""
        call(driver.cuMemAddressFree, address, size_bytes)

    def map(self, address: int, size_bytes: int, handle: Any) -> None:
        """Put a whole chunk at an unmapped address; it may be mapped elsewhere, too."""
        call(driver.cuMemMap, address, size_bytes, 0, handle, 0)

    def allow(self, address: int, size_bytes: int) -> None:
        """Let kernels read and write an interval that is mapped without a hole."""
        call(driver.cuMemSetAccess, address, size_bytes, [self._access], 1)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap an interval that is mapped without a hole, and begins and ends with a chunk."""
        call(driver.cuMemUnmap, address, size_bytes)

    def wait(self) -> None:
        """Return once all kernels have ended that were launched so far."""
        torch.cuda.synchronize(self.device)

    def tensor(self, address: int, size_bytes: int) -> torch.Tensor:
        """Flat uint8 over address space, mapped or not."""
        return tensor_over(address, size_bytes, self.device)


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call of the driver. Raises DeviceError."""
    code, *values = function(*arguments)
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        free_bytes, all_bytes = torch.cuda.mem_get_info()
        raise DeviceError(
            f"{function.__name__}: the GPU is full: {free_bytes >> 20} of {all_bytes >> 20} MiB are"
            " free; lower 'memory', or end what else runs there (nvidia-smi shows it)"
        )
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"{function.__name__} failed with {code.name}; see the driver's log")
    return values[0] if values else None
