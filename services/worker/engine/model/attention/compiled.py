"""Paged attention by a compiled call per layer, without copies of K and V (CPU, single thread)."""

import torch

from services.worker.engine.model.attention.paged import AttentionMetadata
from services.worker.engine.model.cpu_kernels.paged_attention import PagedAttentionKernel


class CompiledPagedAttention:
    """Compiled paged attention, for cache shapes that the kernel supports (`fits`)."""

    def __init__(self, head_dim: int, storage_dtype: torch.dtype) -> None:
        self._kernel = PagedAttentionKernel(head_dim, storage_dtype)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        sliding_window: int | None,
        scaling: float,
    ) -> torch.Tensor:
        return self._kernel(
            *(query.contiguous(), key.contiguous(), value.contiguous(), blocks),
            *(metadata.spans, metadata.tables, sliding_window or 0, scaling),
        )
