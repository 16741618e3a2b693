"""Paged attention on a GPU by the kernels of `gpu_kernels`, and the inputs of an iteration.

All that kernels need of a batch is put together on the host and copied to the device once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2

import numpy as np
import torch
import triton

from services.worker.engine.model.attention.paged import AttentionMetadata
from services.worker.engine.model.gpu_kernels import attention
from services.worker.engine.model.gpu_kernels.launcher import Launcher

HEAD_DIMS = (16, 32, 64, 128)
"""With 256, programs need more shared memory than many GPUs have."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_TOKENS = 64
"""Tokens of the context that a program reads at once."""
DECODE_ROWS, PREFILL_ROWS, WIDE_PREFILL_ROWS = 16, 128, 32
"""Rows of a program: query heads that share K and V, of one or more tokens; the last of float32."""
PROGRAMS_WANTED = 1024
PREFILL_PROGRAMS_WANTED = 256
"""Some for each multiprocessor, so that none waits long for the last."""
SHARE_MIN, SPLITS_MAX = 256, 64
"""Tokens of context of a program at least, and programs for a context at most."""
PARTS_ROWS = 8192
"""Rows of all tiles times splits at most, which bounds the memory of parts."""
LOG2_E = log2(e)


def fits(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can attend over such a cache."""
    return head_dim in HEAD_DIMS and dtype in DTYPES


def parts_bytes(num_heads: int, head_dim: int) -> int:
    """The most memory of split attention: parts and weights in float32."""
    return PARTS_ROWS * num_heads * (head_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """Some tiles as the kernels take them, whose programs have `rows`: [tiles] each.

    `lengths` has the context of each up to its last token; `most` is the largest of `counts`.
    `shares`: how their contexts are split, if that is settled.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    lengths: np.ndarray
    rows: int
    most: int
    shares: tuple[int, int] | None = None

    def split(self, kv_heads: int, window: int | None) -> tuple[int, int]:
        """Tokens of the context of a program, and how many programs share a context."""
        if self.shares is not None:
            return self.shares
        seen = self.lengths
        if window is not None:
            seen = np.minimum(seen, window + self.most + TILE_TOKENS)
        wanted = PROGRAMS_WANTED if self.rows == DECODE_ROWS else PREFILL_PROGRAMS_WANTED
        return split_contexts(seen, len(seen) * self.most, kv_heads, wanted)


def split_contexts(
    lengths: np.ndarray, rows: int, kv_heads: int, programs_wanted: int
) -> tuple[int, int]:
    """(share, splits) for contexts of `lengths` whose tiles have `rows` tokens in all."""
    longest, total = int(lengths.max()), int(lengths.sum())
    splits_max = min(SPLITS_MAX, PARTS_ROWS // rows)
    # Many programs are busy alike, unless one context is much longer than the others.
    busy = len(lengths) * kv_heads >= programs_wanted and longest * len(lengths) <= 2 * total
    if splits_max < 2 or busy:
        return longest, 1
    even = total * kv_heads // programs_wanted
    share = max(SHARE_MIN, even, -(-longest // splits_max))
    share = -(-share // TILE_TOKENS) * TILE_TOKENS
    return share, -(-longest // share)


@dataclass(frozen=True, slots=True)
class Work:
    """The inputs of an iteration on the device.

    `slots` [tokens]: where K of each token goes, negative for a token that is only padding.
    """

    slots: torch.Tensor
    tables: torch.Tensor
    tiles: tuple[Tiles, ...]


class GpuPagedAttention:
    """For caches that `fits`; keeps the inputs of the latest iteration, for all of its layers."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.block_size = head_dim, block_size
        self._group = num_heads // num_kv_heads
        least = triton.next_power_of_2(self._group)
        prefill = PREFILL_ROWS if dtype.itemsize == 2 else WIDE_PREFILL_ROWS
        self.decode_rows, self._prefill_rows = max(DECODE_ROWS, least), max(prefill, least)
        self._device = device
        self._attend_kernel, self._combine_kernel = (
            Launcher(kernel) for kernel in (attention.attend, attention.combine)
        )
        self._metadata: AttentionMetadata | None = None
        self._work: Work | None = None

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
        """As `PagedAttention.forward`."""
        work = self.work(metadata)
        rows = blocks.view(-1, *key.shape[1:])
        rows.index_copy_(0, work.slots, key)
        rows.index_copy_(0, work.slots + self.block_size, value)
        return self.attend(query.contiguous(), blocks, work, sliding_window, scaling)

    def attend(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        work: Work,
        sliding_window: int | None,
        scaling: float,
    ) -> torch.Tensor:
        """Attend when K and V of the new tokens are in the cache: [tokens, head, head_dim]."""
        attended = torch.empty_like(query)
        for tiles in work.tiles:
            self._attend(query, blocks, work, tiles, sliding_window, scaling, attended)
        return attended

    def work(self, metadata: AttentionMetadata) -> Work:
        """The inputs that all layers of the iteration share."""
        if self._work is None or metadata is not self._metadata:
            self._metadata, self._work = metadata, self._work_of(metadata)
        return self._work

    def _attend(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        work: Work,
        tiles: Tiles,
        window: int | None,
        scaling: float,
        attended: torch.Tensor,
    ) -> None:
        share, splits = tiles.split(self.num_kv_heads, window)
        parts, weights = attended, attended
        if splits > 1:
            shape = (len(tiles.starts), tiles.most, self.num_heads, splits)
            parts = query.new_empty(*shape, self.head_dim, dtype=torch.float32)
            weights = query.new_empty(shape, dtype=torch.float32)
        wide = query.dtype.itemsize > 2
        self._attend_kernel(
            (len(tiles.starts), self.num_kv_heads, splits),
            (
                *(query, blocks, work.tables),
                *(tiles.starts, tiles.counts, tiles.positions, tiles.firsts),
                *(parts, weights, scaling * LOG2_E, share, splits, tiles.most, window or 0),
            ),
            *(self.num_heads, self.num_kv_heads, self._group, tiles.rows),
            *(self.head_dim, self.block_size, splits > 1, window is not None),
            TILE_TOKENS // 2 if wide else TILE_TOKENS,
            num_warps=8 if tiles.rows == PREFILL_ROWS else 4,
            num_stages=1 if wide else 3,
        )
        if splits > 1:
            self._combine_kernel(
                (len(tiles.starts), tiles.most, self.num_heads),
                (parts, weights, attended, tiles.starts, tiles.counts, splits, tiles.most),
                *(self.num_heads, self.head_dim, SPLITS_MAX),
            )

    def _work_of(self, metadata: AttentionMetadata) -> Work:
        each = self._prefill_rows // self._group
        columns = [*single_tiles(metadata.spans), *longer_tiles(metadata.spans, each)]
        *parts, tables, slots = to_device(
            [*columns, metadata.tables, metadata.slots_of_keys], self._device
        )
        kinds = (
            (columns[:4], parts[:4], self.decode_rows),
            (columns[4:], parts[4:], self._prefill_rows),
        )
        tiles = []
        for (_, host_counts, host_positions, _), there, rows in kinds:
            if len(host_counts):
                starts, counts, positions, firsts = there
                lengths, most = host_positions + host_counts, int(host_counts.max())
                tiles.append(Tiles(starts, counts, positions, firsts, lengths, rows, most))
        return Work(slots, tables, tuple(tiles))


def to_device(columns: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies of int64 `columns`, by one transfer.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not.
    """
    sizes = [len(column) + len(column) % 2 for column in columns]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for column, place in zip(columns, host.split(sizes), strict=True):
        place.numpy()[: len(column)] = column
    copies = host.to(device, non_blocking=True).split(sizes)
    return [copy[: len(column)] for copy, column in zip(copies, columns, strict=True)]


def single_tiles(spans: np.ndarray) -> Sequence[np.ndarray]:
    """The spans of one token, a tile each: four columns, as `Tiles` has them."""
    start, count, position, first = spans[spans[:, 1] == 1, :4].T
    return start, count, position, first


def longer_tiles(spans: np.ndarray, tile_tokens: int) -> Sequence[np.ndarray]:
    """The other spans, cut into tiles of `tile_tokens` at most."""
    spans = spans[spans[:, 1] > 1]
    pieces = -(-spans[:, 1] // tile_tokens)
    owner = np.repeat(np.arange(len(spans)), pieces)
    done = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tile_tokens
    start, count, position, first = spans[owner, :4].T
    return start + done, np.minimum(count - done, tile_tokens), position + done, first
