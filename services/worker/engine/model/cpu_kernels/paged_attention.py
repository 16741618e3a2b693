"""Kernel of attention for a batch over the paged KV cache: store K and V, decode, prefill.

`spans` and `tables` describe the sequences of a batch; see `attention.paged.AttentionMetadata`.
"""

import numpy as np
import torch

from services.worker.engine.memory.panels import PANEL, WORD_BYTES
from services.worker.engine.model.cpu_kernels.compiler import (
    compiled,
    narrow,
    stored_array,
)
from services.worker.engine.model.cpu_kernels.decode_attention import (
    SLOTS,
    attend_rows,
    unpacked,
)
from services.worker.engine.model.cpu_kernels.panel_gemm import panel_calls, product_instructions
from services.worker.engine.model.cpu_kernels.prefill_attention import (
    AMX_PAIRS,
    KEYS,
    ROWS,
    attend_chunk,
)
from services.worker.engine.model.cpu_kernels.small_product import release

_HEADS, _CACHE = "float32[:, :, ::1]", "STORED[:, :, :, :, ::1]"
_SPANS = "int64[:, ::1], int64[::1]"


@compiled(f"void({_HEADS}, {_HEADS}, {_CACHE}, {_SPANS})")
def store(key, value, blocks, spans, tables):  # type: ignore[no-untyped-def]
    """Write `key` and `value` [tokens, kv_head, head_dim] to `blocks`."""
    _, _, slots, kv_heads, size = blocks.shape
    for index in range(len(spans)):
        first_row, rows, start, first_block = unpacked(spans[index])
        # Clear a block that is started and not filled: products read whole blocks, and masked
        # values must be finite. Another sequence may have entries in a shared block.
        last, left = (start + rows) // slots, (start + rows) % slots
        if left and start <= last * slots and spans[index, 5] >= 0:
            blocks[tables[first_block + last]] = 0
        # A turned tail, the first block, grows downwards.
        begin = spans[index, 5] - 1 if spans[index, 5] > 0 else start
        for m in range(rows):
            position = begin + m
            block = blocks[tables[first_block + position // slots]]
            for kv_head in range(kv_heads):
                to_key = block[0, position % slots, kv_head]
                to_value = block[1, position % slots, kv_head]
                for k in range(size):
                    to_key[k] = narrow(key[first_row + m, kv_head, k], to_key)
                    to_value[k] = narrow(value[first_row + m, kv_head, k], to_value)


@compiled(
    f"void(int64[::1], {_HEADS}, {_HEADS}, {_HEADS}, {_CACHE}, {_SPANS}, int64, float32,"
    f" {_HEADS}, STORED[:, :, ::1], {_HEADS}, uint32[:, ::1], uint32[:, :, ::1],"
    " float32[:, ::1], STORED[:, ::1])"
)
def attend(  # type: ignore[no-untyped-def]
    calls, query, key, value, blocks, spans, tables, window, scaling, output, inputs, states, keys,
    values, scores, weights,
):  # fmt: skip
    """Store `key` and `value`, then attend; writes `output` [tokens, head, head_dim].

    `window`: number of last positions to attend to; 0 for all. Arguments from `inputs` on are
    scratch for `attend_chunk`.
    """
    # Store first, because the new tokens attend to each other through the cache.
    store(key, value, blocks, spans, tables)
    attend_rows(query, blocks, spans, tables, window, scaling, output)
    for index in range(len(spans)):
        first_row, rows, start, first_block = unpacked(spans[index])
        if not spans[index, 4]:
            attend_chunk(
                calls, query[first_row : first_row + rows], blocks, tables[first_block:], start,
                window, scaling, output[first_row : first_row + rows], inputs, states, keys, values,
                scores, weights,
            )  # fmt: skip
    release(calls[1])  # once per batch, not per product


def fits(block_size: int, head_dim: int, storage_dtype: torch.dtype) -> bool:
    """Whether the kernel supports this CPU, the dtype and the shape of the KV cache."""
    return (
        block_size % SLOTS == 0
        and head_dim % WORD_BYTES == 0
        and panel_calls(storage_dtype) is not None
    )


class AttentionScratch:
    """Allocates scratch for `attend_chunk`, for KV caches of a dtype."""

    def __init__(self, head_dim: int, storage_dtype: torch.dtype) -> None:
        self._head_dim = head_dim
        self._storage_dtype = storage_dtype
        key_words = head_dim * storage_dtype.itemsize // WORD_BYTES
        value_words = KEYS * storage_dtype.itemsize // WORD_BYTES
        pairs = AMX_PAIRS if "amx_bf16" in product_instructions(storage_dtype) else 1
        # torch aligns memory for vectors. Columns beyond head_dim in the last panel stay 0.
        self._tile = (
            torch.zeros(key_words, KEYS, dtype=torch.uint32).numpy(),
            torch.zeros(-(-head_dim // PANEL), value_words, PANEL, dtype=torch.uint32).numpy(),
            torch.empty(pairs * ROWS, KEYS).numpy(),
            stored_array(torch.empty(pairs * ROWS, KEYS, dtype=storage_dtype)),
        )

    def arrays(self, spans: np.ndarray, heads: int) -> tuple[np.ndarray, ...]:
        """Return the scratch arguments of `attend`, sized for the longest of `spans`."""
        longest = int(spans[:, 1].max())
        inputs = torch.empty(longest, heads, self._head_dim, dtype=self._storage_dtype)
        return (stored_array(inputs), torch.empty(heads, longest, 2).numpy(), *self._tile)


class PagedAttentionKernel:
    """Calls `attend` with its scratch, for KV caches of a dtype."""

    def __init__(self, head_dim: int, storage_dtype: torch.dtype) -> None:
        attend.load(storage_dtype)
        self._calls = panel_calls(storage_dtype)
        self._scratch = AttentionScratch(head_dim, storage_dtype)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        blocks: torch.Tensor,
        spans: np.ndarray,
        tables: np.ndarray,
        window: int,
        scaling: float,
    ) -> torch.Tensor:
        """Attend; returns [tokens, head, head_dim]. Arguments as for `attend`, contiguous.

        Raises ValueError if the shapes of query, keys and blocks do not match.
        """
        _, _, slots, kv_heads, head_dim = blocks.shape
        tokens, heads, query_dim = query.shape
        # Check the shapes here, because kernels do not check bounds.
        if query_dim != head_dim or heads % kv_heads or slots % SLOTS:
            raise ValueError(f"a query {tuple(query.shape)} cannot attend to {tuple(blocks.shape)}")
        if not key.shape == value.shape == (tokens, kv_heads, head_dim):
            raise ValueError(f"keys {tuple(key.shape)} cannot be stored in {tuple(blocks.shape)}")
        output = torch.empty_like(query)
        attend(
            *(self._calls, query.numpy(), key.numpy(), value.numpy(), stored_array(blocks)),
            *(spans, tables, window, np.float32(scaling), output.numpy()),
            *self._scratch.arrays(spans, heads),
        )
        return output
