"""Kernels for one thread of a CPU, compiled when a model is loaded, for the dtype of its weights.

To import one takes half a second, so modules import them only where they use them.
"""

import torch

ROWS_MAX = 64
"""The most rows of a batch that a kernel accepts whose weights do not lie in panels."""
STORED_TYPES = {torch.float32: "float32", torch.bfloat16: "uint16"}
"""The dtypes of weights and KV caches, and as what kernels take them; they add up in float32."""


def fit(device: torch.device, storage_dtype: torch.dtype, compute_dtype: torch.dtype) -> bool:
    """Whether the kernels can compute such a model.

    The kernels do not divide work among threads, so they fit only if torch has one thread.
    """
    return (
        device.type == "cpu"
        and storage_dtype in STORED_TYPES
        and compute_dtype == torch.float32
        and torch.get_num_threads() == 1
    )


def has_panel_product(storage_dtype: torch.dtype) -> bool:
    """Whether there is a product for weights in panels on this processor, one that is right.

    It is not timed; ask only where the kernels `fit`.
    """
    from services.worker.engine.model.cpu_kernels.panel_gemm import panel_calls

    return panel_calls(storage_dtype) is not None


def describe_panel_product(storage_dtype: torch.dtype) -> str:
    """The product that `has_panel_product` has found, for logs."""
    from services.worker.engine.model.cpu_kernels.panel_gemm import product_instructions

    dtype = str(storage_dtype).removeprefix("torch.")
    return f"{dtype} panels ({', '.join(product_instructions(storage_dtype))})"
