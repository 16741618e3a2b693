"""Paged attention on a CPU by a compiled kernel (single thread), without copies of K and V."""

import torch

from services.worker.engine.model.attention.paged import AttentionMetadata
from services.worker.engine.model.cpu_kernels.paged_attention import PagedAttentionKernel


class CompiledPagedAttention:
    """Compiled paged attention, for the shapes of `cpu_kernels.paged_attention.fits`."""

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
