"""The configuration of a model runner."""

from dataclasses import dataclass
from pathlib import Path

import torch

LOGIT_ROWS, GPU_LOGIT_ROWS = 64, 256
"""Maximum rows of logits in memory, on a CPU and on a GPU, which waits for the host at each slice.
"""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The model, the device and the memory budget.

    `budget_bytes` covers parameters, KV cache and staging (scratch, activations and logits).
    `chunk_bytes`: granularity of memory mappings; None to choose it. `max_batch_tokens` bounds the
    new tokens of a batch. `min_tokens`: the minimum capacity of the KV cache. `suspends`: reserve
    memory for the hidden states of a suspended batch. `dummy_seed` and `dummy_std` apply to load
    format `dummy`, which has random weights. `host_weights_bytes`: budget of the copies of slabs in
    host memory (see `host_copies`). `device_sampling`: let a GPU sample, instead of the host.
    `overlap`: on a GPU, copy and hash beside iterations.
    """

    model_dir: Path
    device: str
    dtype: torch.dtype
    budget_bytes: int
    block_size: int = 16
    chunk_bytes: int | None = None
    load_format: str = "auto"
    max_batch_tokens: int = 2048
    max_running: int = 128
    max_model_len: int | None = None
    min_tokens: int = 64
    threads: int | None = None
    suspends: bool = False
    dummy_seed: int = 0
    dummy_std: float = 0.02
    host_weights_bytes: int = 0
    device_sampling: bool = True
    overlap: bool = True


def compute_dtype(device: torch.device, storage_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of activations: float32 on a CPU with 16-bit weights, else the weights'."""
    if device.type == "cpu" and storage_dtype.itemsize < torch.float32.itemsize:
        return torch.float32
    return storage_dtype


def logit_rows(device: torch.device) -> int:
    """Return the maximum rows of logits in memory on `device`."""
    return LOGIT_ROWS if device.type == "cpu" else GPU_LOGIT_ROWS


def logits_dtype(computed: torch.dtype) -> torch.dtype:
    """Return the dtype in which the host samples: `computed`, but at least float32."""
    return torch.promote_types(computed, torch.float32)
