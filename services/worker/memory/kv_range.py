"""The KV cache of one layer: one range that grows and shrinks at its tail."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.worker.memory.arena import Arena


@dataclass(frozen=True, slots=True)
class KvBlockShape:
    """A block is [2, slot, kv_head, head_dim]: K, then V, of `block_size` consecutive tokens."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def dims(self) -> tuple[int, int, int, int]:
        """The shape of a block."""
        return (2, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def size_bytes(self) -> int:
        """Bytes of a block in one layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvRange:
    """K and V of one layer, shaped [block, 2, slot, kv_head, head_dim].

    It reserves as much as the whole arena, so that any freed chunk can be mapped at its tail.
    A block may straddle chunks; only wholly mapped blocks count.
    """

    def __init__(self, arena: Arena, name: str, shape: KvBlockShape) -> None:
        self.name = name
        self.shape = shape
        self._arena = arena
        self._range = arena.reserve(name, arena.total_chunks * arena.chunk_bytes)
        self._mapped_chunks = 0
        flat = arena.tensor(self._range, shape.dtype)
        reserved_blocks = self._range.size_bytes // shape.size_bytes
        elements = reserved_blocks * shape.size_bytes // shape.dtype.itemsize
        self._blocks = flat[:elements].view(reserved_blocks, *shape.dims)

    @property
    def mapped_chunks(self) -> int:
        """Chunks behind the range."""
        return self._mapped_chunks

    @property
    def num_blocks(self) -> int:
        """Blocks that may be used: ids 0 .. num_blocks - 1."""
        return self._mapped_chunks * self._arena.chunk_bytes // self.shape.size_bytes

    def blocks(self) -> torch.Tensor:
        """The usable blocks, [num_blocks, 2, slot, kv_head, head_dim]; no copy."""
        return self._blocks[: self.num_blocks]

    def map_tail(self, handles: Sequence[int]) -> None:
        """Grow by `handles`. Their old contents stay; a block is cleared when it is begun."""
        self._arena.map(self._range, self._mapped_chunks, handles)
        self._mapped_chunks += len(handles)

    def unmap_tail(self, count: int) -> list[int]:
        """Shrink by `count` chunks; returns their handles. No one may use the lost blocks."""
        handles = self._arena.unmap(self._range, self._mapped_chunks - count, count)
        self._mapped_chunks -= count
        return handles
