"""The KV cache of a layer: a virtual address range that grows and shrinks at its end (tail).

The memory comes from the arena in *chunks*, named by handles. A chunk is *cold* before its first
touch, and *prepared* if it is mapped here before another owner has released it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.memory.arena import Arena, Handles
from services.worker.engine.memory.device_copies import PinnedSlot
from services.worker.errors import InvalidBlocks

RELOCATION_SLICE_BLOCKS = 64
"""Blocks per slice while blocks are copied within a range, to bound the temporary copy."""


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
        """Bytes of a block in a layer."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KvRange:
    """K and V of a layer, shaped [block, 2, slot, kv_head, head_dim].

    A block may straddle chunks; only fully mapped blocks are usable.
    """

    def __init__(self, arena: Arena, name: str, shape: KvBlockShape) -> None:
        self.name = name
        self.shape = shape
        self._arena = arena
        # Reserve address space for the whole arena, so that any free chunk can extend the range.
        self._range = arena.reserve(name, arena.total_chunks * arena.chunk_bytes)
        self._mapped_chunks = 0
        self._block_bytes = shape.size_bytes
        reserved_blocks = self._range.size_bytes // self._block_bytes
        used_bytes = reserved_blocks * self._block_bytes
        # Views of the same memory: bytes; a numpy array on a CPU; 64-bit words if a block has a
        # whole number of them, which a GPU copies faster; and blocks of the dtype.
        self._bytes = arena.tensor(self._range, torch.uint8)[:used_bytes].view(reserved_blocks, -1)
        self._rows = self._bytes.numpy() if self._bytes.device.type == "cpu" else None
        whole = self._block_bytes % torch.int64.itemsize == 0
        self._words = self._bytes.view(torch.int64) if whole else self._bytes
        self._blocks = self._bytes.view(-1).view(shape.dtype).view(reserved_blocks, *shape.dims)

    @property
    def mapped_chunks(self) -> int:
        """Number of chunks mapped in the range."""
        return self._mapped_chunks

    @property
    def address(self) -> int:
        """The address of block 0, mapped or not; it never changes."""
        return self._blocks.data_ptr()

    @property
    def num_blocks(self) -> int:
        """Number of usable blocks: ids 0 .. num_blocks - 1."""
        return self._mapped_chunks * self._arena.chunk_bytes // self._block_bytes

    def chunks_for(self, num_blocks: int) -> int:
        """Return the number of chunks that `num_blocks` blocks occupy."""
        return -(-num_blocks * self._block_bytes // self._arena.chunk_bytes)

    def blocks(self) -> torch.Tensor:
        """Return a view of the usable blocks, [num_blocks, 2, slot, kv_head, head_dim]."""
        return self._blocks[: self.num_blocks]

    def map_tail(self, handles: Sequence[int] | Handles, *, cold: bool = False) -> int:
        """Grow by `handles`; returns the number of mapping calls (`cold`: see `Arena.map`).

        The chunks have undefined contents; attention clears a block when it writes the first slot.
        """
        calls = self._arena.map(self._range, self._mapped_chunks, handles, cold=cold)
        self._mapped_chunks += len(handles)
        return calls

    def prepare_tail(self, handles: Handles) -> int:
        """Map `handles` after the tail, for a later `extend` (see `Arena.prepare`)."""
        return self._arena.prepare(self._range, self._mapped_chunks, handles)

    def extend(self, chunks: int) -> None:
        """Grow by chunks that `prepare_tail` has mapped, after `Arena.adopt`."""
        self._mapped_chunks += chunks

    def retire_tail(self, chunks: int) -> None:
        """Shrink to at most `chunks` chunks. The blocks beyond them must not be in use."""
        removed = self._mapped_chunks - chunks
        if removed > 0:
            self._arena.retire(self._range, chunks, removed)
            self._mapped_chunks = chunks

    def pack(
        self, block_ids: Sequence[int], target: torch.Tensor | PinnedSlot | None = None
    ) -> torch.Tensor:
        """Copy blocks to the host, to `target` if given: uint8 [len(block_ids) × block bytes].

        To a slot, the copy is only started. Raises InvalidBlocks.
        """
        index = self._index(block_ids)
        if isinstance(target, PinnedSlot):
            self._check_size(target.piece, len(index))
            target.gather(self._words, index)
            return target.piece
        packed = target
        if packed is None:
            packed = torch.empty(len(index) * self._block_bytes, dtype=torch.uint8)
        self._check_size(packed, len(index))
        rows = packed.view(len(index), self._block_bytes)
        if self._rows is not None:
            torch.index_select(self._bytes, 0, index, out=rows)
        else:
            rows.copy_(self._words[index.to(self._words.device)].view(torch.uint8))
        return packed

    def unpack(self, block_ids: Sequence[int], payload: torch.Tensor | PinnedSlot) -> None:
        """Overwrite blocks with the result of `pack`; from a slot, the copy is only started.

        Raises InvalidBlocks.
        """
        index = self._index(block_ids)
        if isinstance(payload, PinnedSlot):
            self._check_size(payload.piece, len(index))
            payload.scatter(self._words, index)
            return
        self._check_size(payload, len(index))
        rows = payload.view(len(index), self._block_bytes)
        if self._rows is not None:
            # Use numpy (0.04 ms per MiB), because torch's index_copy_ copies byte by byte (0.55).
            self._rows[index.numpy()] = rows.numpy()
        else:
            device = self._words.device
            self._words[index.to(device)] = rows.to(device).view(self._words.dtype)

    def relocate(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy each source block to its target; sources and targets must be disjoint.

        Raises InvalidBlocks.
        """
        # Sources and targets are disjoint, so slices may be copied in any order.
        for first in range(0, len(sources), RELOCATION_SLICE_BLOCKS):
            part = slice(first, first + RELOCATION_SLICE_BLOCKS)
            if self._rows is not None:
                self.unpack(targets[part], self.pack(sources[part]))
            else:
                index = torch.stack([self._index(sources[part]), self._index(targets[part])])
                # Pinned memory makes the copy asynchronous: the stage's lock is held.
                source, target = index.pin_memory().to(self._words.device, non_blocking=True)
                self._words[target] = self._words[source]

    def turn(self, block: int, filled: int) -> None:
        """Copy the entries of the first `filled` slots of a block to its end, in reverse order.

        Raises InvalidBlocks.
        """
        self._index([block])
        slots = self._blocks[block]
        slots[:, self.shape.block_size - filled :] = slots[:, :filled].flip(1)

    def _check_size(self, payload: torch.Tensor, blocks: int) -> None:
        if payload.dtype != torch.uint8 or payload.numel() != blocks * self._block_bytes:
            raise InvalidBlocks(
                f"{self.name}: {payload.numel()} values of {payload.dtype} are not the bytes of "
                f"{blocks} blocks; send the result of pack_kv"
            )

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(block_ids, dtype=torch.int64)
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.num_blocks:
            raise InvalidBlocks(
                f"{self.name} has blocks 0 to {self.num_blocks - 1}, but the ids are "
                f"{min(block_ids)} to {max(block_ids)}; use ids of mapped blocks"
            )
        return index


def grow_tails(
    arena: Arena, ranges: Sequence[KvRange], chunks_max: int | None, *, cold: bool
) -> tuple[int, int]:
    """Extend `ranges` by free chunks to a common length; returns (chunks, mapping calls).

    The common length is at most `chunks_max`; longer ranges stay unchanged. Chunks stay free if
    there are too few for another chunk in every range.
    """
    growth = _growth(ranges, arena.free_chunks, chunks_max)
    handles = arena.free_handles(int(growth.sum()))
    calls = 0
    for kv_range, part in _split(ranges, handles, growth):
        calls += kv_range.map_tail(part, cold=cold)
    return len(handles), calls


def prepare_tails(
    arena: Arena, ranges: Sequence[KvRange], leaving_handles: Handles
) -> list[tuple[KvRange, int]]:
    """Prepare the mappings that `grow_tails` would make if `leaving_handles` were free, too.

    Returns the ranges that will grow, each with its number of additional chunks.
    """
    growth = _growth(ranges, arena.free_chunks + len(leaving_handles), None)
    handles = arena.free_handles(int(growth.sum()), leaving_handles)
    grown = _split(ranges, handles, growth)
    for kv_range, part in grown:
        kv_range.prepare_tail(part)
    return [(kv_range, len(part)) for kv_range, part in grown]


def _growth(ranges: Sequence[KvRange], supply: int, chunks_max: int | None) -> Handles:
    """Return the number of chunks to add to each range."""
    mapped = np.array([kv_range.mapped_chunks for kv_range in ranges])
    level = _water_level(mapped, supply)
    if chunks_max is not None:
        level = min(level, chunks_max)
    return np.maximum(level - mapped, 0)


def _split(
    ranges: Sequence[KvRange], handles: Handles, growth: Handles
) -> list[tuple[KvRange, Handles]]:
    """Distribute handles; returns the ranges that grow with their handles."""
    parts = np.split(handles, np.cumsum(growth)[:-1])
    return [(kv_range, part) for kv_range, part in zip(ranges, parts, strict=True) if len(part)]


def _water_level(heights: Handles, supply: int) -> int:
    """Water-filling: return the highest level to which `supply` can raise all lower `heights`."""
    ordered = np.sort(heights).tolist()
    count, total = len(ordered), sum(ordered)
    # Exclude the highest range while it exceeds the level of the others.
    while (supply + total) // count < ordered[count - 1]:
        count -= 1
        total -= ordered[count]
    return (supply + total) // count
