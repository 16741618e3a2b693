"""Kernels for one thread of a processor, compiled when a model is loaded.

Importing one takes half a second, so that is done where it is needed only.
"""

import torch

ROWS_MAX = 64
"""No kernel takes more rows of a batch."""
STORED_DTYPES = (torch.float32, torch.bfloat16)
"""What weights and KV caches may be stored in; all computing is in float32."""


def fit(device: torch.device, storage_dtype: torch.dtype, compute_dtype: torch.dtype) -> bool:
    """Whether the kernels serve such a model. The library divides work among threads, they do not.

    The number of threads is torch's own.
    """
    return (
        device.type == "cpu"
        and storage_dtype in STORED_DTYPES
        and compute_dtype == torch.float32
        and torch.get_num_threads() == 1
    )
