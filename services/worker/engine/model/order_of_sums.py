"""What makes two workers with the same parameters compute other tokens."""

import torch

from services.worker.engine.model import cpu_kernels


def order_of_sums(
    device: torch.device, storage_dtype: torch.dtype, compute_dtype: torch.dtype
) -> bytes:
    """What changes the last bits of sums among processors.

    Kernels and torch add up as many values at once as a vector of a CPU has; for bfloat16 there no
    tokens are promised, so such workers may differ. A GPU forms no group with a CPU, with
    another kind of GPU, or with one under another version of torch, in any dtype.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}".encode()
    if storage_dtype == torch.bfloat16:
        return b""
    if not cpu_kernels.fit(device, storage_dtype, compute_dtype):
        return f"torch, {torch.backends.cpu.get_cpu_capability()}".encode()
    from services.worker.engine.model.cpu_kernels.compiler import VECTOR_FLOATS

    return f"vectors of {VECTOR_FLOATS}".encode()
