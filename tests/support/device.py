"""The device that tests of models and memory run on: `TIDESERVE_TEST_DEVICE`, else the processor.

On a GPU the same tests run, with chunks as its driver has them and as many of them, in the dtype
`TIDESERVE_TEST_DTYPE`: float32 for the kernels, float64 for torch's operations.
"""

import os

import torch

from services.worker.engine.memory.arena import Arena
from services.worker.engine.memory.budget import CPU_CHUNKS, GPU_CHUNKS
from services.worker.engine.memory.cuda import CudaArena
from services.worker.engine.memory.device_copies import DeviceCopies
from services.worker.engine.memory.memfd import MemfdArena
from tests.support.fake_cuda_driver import FakeCudaDriver
from tests.support.fake_streams import FakeStreams

DEVICE = os.environ.get("TIDESERVE_TEST_DEVICE", "cpu")
EXACT: torch.dtype = getattr(torch, os.environ.get("TIDESERVE_TEST_DTYPE", "float64"))
"""The dtype of tests that compare tokens."""
ON_GPU = torch.device(DEVICE).type == "cuda"
KINDS = ("cuda",) if ON_GPU else ("cpu", "cuda")
"""The classes of arenas to test."""
CHUNK_BYTES = (GPU_CHUNKS if ON_GPU else CPU_CHUNKS).least

SMALL_BUDGET = (192 if ON_GPU else 24) << 20
"""Memory of a worker with few KV blocks, in bytes; on a GPU most of it is staging."""


def chunks_of(cpu_bytes: int) -> int:
    """The bytes of as many chunks as `cpu_bytes` hold on a processor."""
    return cpu_bytes // CPU_CHUNKS.least * CHUNK_BYTES


def make_arena(kind: str, total_chunks: int) -> Arena:
    """An arena of the class for `kind`; without a GPU, a CUDA arena uses the fake driver."""
    if kind == "cpu":
        return MemfdArena(chunk_bytes=CHUNK_BYTES, total_chunks=total_chunks)
    sizes = {"chunk_bytes": CHUNK_BYTES, "total_chunks": total_chunks}
    if not ON_GPU:
        driver = FakeCudaDriver(CHUNK_BYTES)
        copies = DeviceCopies(FakeStreams(driver), block_bytes=CHUNK_BYTES)
        return CudaArena(driver, copies.fence, **sizes)
    from services.worker.engine.memory.cuda_driver import CudaDriver
    from services.worker.engine.memory.cuda_streams import CudaStreams

    device = torch.device(DEVICE)
    streams = CudaStreams(device, copy_bytes=CHUNK_BYTES, block_bytes=CHUNK_BYTES)
    copies = DeviceCopies(streams, block_bytes=CHUNK_BYTES)
    return CudaArena(CudaDriver(device), copies.fence, **sizes)
