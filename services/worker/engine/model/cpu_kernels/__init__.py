"""Single-threaded CPU kernels (numba), compiled at model load for the dtype of the weights.

Importing a kernel takes half a second, so modules import kernels only where they use them.
"""

import torch

ROWS_MAX = 64
"""Maximum rows (tokens) of a batch for kernels with row-major weights."""
STORED_TYPES = {torch.float32: "float32", torch.bfloat16: "uint16"}
"""Storage dtypes of weights and KV caches, with the type that kernels use for them.

Kernels accumulate in float32.
"""


def fit(device: torch.device, storage_dtype: torch.dtype, compute_dtype: torch.dtype) -> bool:
    """Whether the kernels support these dtypes on this device.

    The kernels are single-threaded, so they support a process whose torch has a single thread.
    """
    return (
        device.type == "cpu"
        and storage_dtype in STORED_TYPES
        and compute_dtype == torch.float32
        and torch.get_num_threads() == 1
    )


def has_panel_product(storage_dtype: torch.dtype) -> bool:
    """Whether this CPU has a correct product for packed weights. Call it only if kernels `fit`."""
    from services.worker.engine.model.cpu_kernels.panel_gemm import panel_calls

    return panel_calls(storage_dtype) is not None


def describe_panel_product(storage_dtype: torch.dtype) -> str:
    """Describe the matrix product of `has_panel_product`, for logs."""
    from services.worker.engine.model.cpu_kernels.panel_gemm import product_instructions

    dtype = str(storage_dtype).removeprefix("torch.")
    return f"{dtype} panels ({', '.join(product_instructions(storage_dtype))})"
