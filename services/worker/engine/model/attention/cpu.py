"""Paged attention with torch operations: gather K and V, cast, scaled-dot-product attention (SDPA).

It works on every torch device and is optimized for CPUs: it gathers few sequences at a time, so
that their K and V stay in the CPU cache, which measured best. On a CPU with `cpu_kernels` and a
suitable block size, a compiled kernel runs decode steps.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

from services.worker.engine.model.attention.paged import (
    GROUP_TOKENS,
    AttentionMetadata,
    DecodeGroup,
    PrefillSpan,
)

QUERY_TILE_ROWS = 128
"""Maximum rows of a prefill chunk per SDPA call with a mask."""


def mask_bytes(max_context: int, itemsize: int) -> int:
    """Return an upper bound of mask memory per window: a mask and the larger one replacing it."""
    return 2 * QUERY_TILE_ROWS * (max(max_context, GROUP_TOKENS) + QUERY_TILE_ROWS) * itemsize


class SdpaPagedAttention:
    """Attention by SDPA, with buffers for contexts of up to `max_context` tokens per sequence.

    `compiled`: use the kernels of `cpu_kernels`.
    """

    def __init__(
        self,
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        max_context: int,
        storage_dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device,
        compiled: bool = False,
    ) -> None:
        self._half_shape = (block_size, num_kv_heads, head_dim)
        half_elements = block_size * num_kv_heads * head_dim
        # Add a block, because a sliding window may start within a block.
        halves = 2 * (-(-max(max_context, GROUP_TOKENS) // block_size) + 1)
        self._stored = torch.empty(halves, half_elements, dtype=storage_dtype, device=device)
        self._upcast = (
            self._stored
            if compute_dtype == storage_dtype
            else torch.empty(halves, half_elements, dtype=compute_dtype, device=device)
        )
        self._max_context = max(max_context, GROUP_TOKENS)
        self._masks: dict[int | None, torch.Tensor] = {}
        self._decode = _compiled_decode(block_size, storage_dtype) if compiled else None

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
        if metadata.begun_blocks is not None:
            blocks.index_fill_(0, metadata.begun_blocks, 0)
        rows = blocks.view(-1, *key.shape[1:])
        rows.index_copy_(0, metadata.slots, torch.cat([key, value]).to(blocks.dtype))
        output = query.new_empty(query.shape)
        if self._decode is not None:
            seen = (metadata.spans, metadata.tables, sliding_window or 0)
            self._decode(query, blocks, *seen, scaling, output)
        else:
            for group in metadata.decode_groups(sliding_window):
                self._sdpa_decode(query, blocks, group, scaling, output)
        for span in metadata.prefill_spans(sliding_window):
            self._prefill(query, blocks, span, scaling, sliding_window, output)
        return output

    def _sdpa_decode(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        group: DecodeGroup,
        scaling: float,
        output: torch.Tensor,
    ) -> None:
        rows, mask = group.rows, group.mask
        sequences, slots = len(rows), mask.shape[-1]
        _, kv_heads, head_dim = self._half_shape
        gathered = self._gather(blocks, group.halves)
        # Grouped-query attention: fold the query heads of a KV head into query rows, so that K and
        # V are never repeated.
        keys, values = gathered.view(2, sequences, slots, kv_heads, head_dim)
        folded = query[rows].view(sequences, kv_heads, -1, head_dim)
        attended = functional.scaled_dot_product_attention(
            folded,
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            scale=scaling,
        )
        output[rows] = attended.reshape(sequences, -1, head_dim)

    def _prefill(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        span: PrefillSpan,
        scaling: float,
        sliding_window: int | None,
        output: torch.Tensor,
    ) -> None:
        _, kv_heads, head_dim = self._half_shape
        gathered = self._gather(blocks, span.halves).view(2, -1, kv_heads, 1, head_dim)
        # [kv_head, query heads per kv_head, token, head_dim]: expand with stride 0, so that grouped
        # K and V are never repeated.
        share = query.shape[1] // kv_heads
        keys, values = gathered.permute(0, 2, 3, 1, 4).expand(-1, -1, share, -1, -1)
        end = span.first_row + span.rows
        folded = query[span.first_row : end].view(span.rows, kv_heads, share, head_dim)
        folded = folded.permute(1, 2, 0, 3)
        target = output[span.first_row : end].view(span.rows, kv_heads, share, head_dim)
        target = target.permute(1, 2, 0, 3)
        offset = span.start - span.base
        # Use SDPA's faster causal path if the chunk starts at position 0 and fits the window.
        if offset == 0 and (sliding_window is None or span.rows <= sliding_window):
            target.copy_(
                functional.scaled_dot_product_attention(
                    folded,
                    keys[:, :, : span.rows],
                    values[:, :, : span.rows],
                    is_causal=True,
                    scale=scaling,
                )
            )
            return
        # Attend in tiles of rows, to bound the mask and skip keys that no row of a tile sees.
        for first in range(0, span.rows, QUERY_TILE_ROWS):
            last = min(first + QUERY_TILE_ROWS, span.rows)
            lowest = 0 if sliding_window is None else max(0, offset + first - sliding_window + 1)
            mask = self._mask(offset + first - lowest, last - first, sliding_window)
            target[:, :, first:last] = functional.scaled_dot_product_attention(
                folded[:, :, first:last],
                keys[:, :, lowest : offset + last],
                values[:, :, lowest : offset + last],
                attn_mask=mask,
                scale=scaling,
            )

    def _gather(self, blocks: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
        """Gather half blocks in the compute dtype into a buffer that the next call overwrites."""
        count = len(halves)
        source = blocks.view(2 * len(blocks), -1)
        stored = torch.index_select(source, 0, halves, out=self._stored[:count])
        if self._upcast is self._stored:
            return stored
        return self._upcast[:count].copy_(stored)

    def _mask(self, prefix: int, rows: int, sliding_window: int | None) -> torch.Tensor:
        """Return a mask [rows, prefix + rows]: row i sees keys 0 .. prefix + i in its window."""
        # Visibility depends only on prefix + row - column, so a mask is a view of a larger matrix,
        # without its first `left` columns.
        mask = self._masks.get(sliding_window)
        if mask is None or prefix > mask.shape[1] - QUERY_TILE_ROWS:
            # Double the size, so that a growing prefix rarely rebuilds the matrix.
            mask = self._build_mask(
                min(max(2 * prefix, GROUP_TOKENS), self._max_context), sliding_window
            )
            self._masks[sliding_window] = mask
        left = mask.shape[1] - QUERY_TILE_ROWS - prefix
        return mask[:rows, left : left + prefix + rows]

    def _build_mask(self, prefix: int, sliding_window: int | None) -> torch.Tensor:
        """Return a matrix [tile, prefix + tile]: 0 for visible keys, -inf elsewhere."""
        shape = (QUERY_TILE_ROWS, prefix + QUERY_TILE_ROWS)
        mask = self._upcast.new_full(shape, -torch.inf).triu_(prefix + 1)
        if sliding_window is not None:
            mask += self._upcast.new_full(shape, -torch.inf).tril_(prefix - sliding_window)
        return mask


def _compiled_decode(block_size: int, storage_dtype: torch.dtype) -> Callable[..., None] | None:
    from services.worker.engine.model.cpu_kernels import decode_attention

    if block_size % decode_attention.SLOTS:
        return None
    decode_attention.attend_rows.load(storage_dtype)
    return decode_attention.attend
