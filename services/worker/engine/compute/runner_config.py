"""What a model runner is made with, and what follows from that alone."""

from dataclasses import dataclass
from pathlib import Path

import torch

LOGIT_ROWS = 64
"""Rows of logits that exist at once."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """What to load, where, and how much memory it may take.

    `budget_bytes` covers parameters, KV cache and staging. `chunk_bytes` None chooses.
    `max_batch_tokens` bounds the new tokens of a batch, `min_tokens` the least KV cache that is
    worth starting with; `dummy_seed` and `dummy_std` shape the weights of load format `dummy`.
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
    dummy_seed: int = 0
    dummy_std: float = 0.02


def compute_dtype(device: torch.device, storage_dtype: torch.dtype) -> torch.dtype:
    """A CPU computes 16-bit weights in float32 (see `model/linear.py`); else both are the same."""
    if device.type == "cpu" and storage_dtype.itemsize < torch.float32.itemsize:
        return torch.float32
    return storage_dtype
