"""Paged attention on a GPU by the kernels of `gpu_kernels`.

A program (a Triton thread block) computes a *tile*: consecutive tokens of a sequence, with all
query heads of a KV head (the *group*). It may attend to a part of the context only: a long context
is split into `splits` parts of `share` tokens. The host assembles the inputs of all kernels of an
iteration and copies them to the device at once.
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
"""Supported head sizes. 256 would need more shared memory than many GPUs have."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_TOKENS = 64
"""Context tokens that a program loads at a time."""
DECODE_ROWS, PREFILL_ROWS, WIDE_PREFILL_ROWS = 16, 128, 32
"""Rows of a program (tokens × query heads of the group); `WIDE_PREFILL_ROWS` for float32."""
PROGRAMS_WANTED = 1024
PREFILL_PROGRAMS_WANTED = 256
"""Programs per launch of decodes and of prefills: several per multiprocessor, so that few idle
while the last programs run."""
SHARE_MIN, SPLITS_MAX = 256, 64
"""Minimum context tokens per program, and maximum programs per context."""
PARTS_ROWS = 8192
"""Maximum of (rows of all tiles) × splits; bounds the memory of partial results."""
LOG2_E = log2(e)


def fits(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support the head size and dtype of the KV cache."""
    return head_dim in HEAD_DIMS and dtype in DTYPES


def parts_bytes(num_heads: int, head_dim: int) -> int:
    """Return an upper bound of the memory of split attention: partial results and weights."""
    return PARTS_ROWS * num_heads * (head_dim + 1) * 4


@dataclass(frozen=True, slots=True)
class Tiles:
    """Kernel arguments for tiles whose programs have `rows` rows; tensors are [tiles].

    A tile is `counts` consecutive tokens of a sequence, from row `starts` of the batch and from
    position `positions`; its blocks start at `firsts` in the block tables. It sees no position
    below `lowests`. `lengths`: context up to the last token. `most`: maximum of `counts`. `shares`:
    the result of `split` if it is fixed.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    lowests: torch.Tensor
    lengths: np.ndarray
    rows: int
    most: int
    shares: tuple[int, int] | None = None

    def split(self, kv_heads: int, window: int | None) -> tuple[int, int]:
        """Return (share, splits): context tokens per program, and programs per context."""
        if self.shares is not None:
            return self.shares
        visible = self.lengths
        if window is not None:
            # Programs start at a multiple of TILE_TOKENS, possibly before the window.
            visible = np.minimum(visible, window + self.most + TILE_TOKENS)
        wanted = PROGRAMS_WANTED if self.rows == DECODE_ROWS else PREFILL_PROGRAMS_WANTED
        return split_contexts(visible, len(visible) * self.most, kv_heads, wanted)


def split_contexts(
    lengths: np.ndarray, rows: int, kv_heads: int, programs_wanted: int
) -> tuple[int, int]:
    """Return (share, splits) for contexts of `lengths` whose tiles have `rows` tokens in total."""
    longest, total = int(lengths.max()), int(lengths.sum())
    splits_max = min(SPLITS_MAX, PARTS_ROWS // rows)
    # Do not split if the GPU is full already, unless a context is much longer than the others.
    busy = len(lengths) * kv_heads >= programs_wanted and longest * len(lengths) <= 2 * total
    if splits_max < 2 or busy:
        return longest, 1
    # Flash decoding: split long contexts evenly over the wanted number of programs.
    even = total * kv_heads // programs_wanted
    share = max(SHARE_MIN, even, -(-longest // splits_max))
    share = -(-share // TILE_TOKENS) * TILE_TOKENS
    return share, -(-longest // share)


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """The attention inputs of an iteration on the device.

    `slots` [tokens]: K's slot of each token, negative for padding.
    """

    slots: torch.Tensor
    tables: torch.Tensor
    tiles: tuple[Tiles, ...]


class GpuPagedAttention:
    """Attention by the GPU kernels; caches the inputs of the latest iteration for its layers."""

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
        # A program computes all query heads of a group, so it has at least as many rows.
        least = triton.next_power_of_2(self._group)
        prefill = PREFILL_ROWS if dtype.itemsize == 2 else WIDE_PREFILL_ROWS
        self.decode_rows, self._prefill_rows = max(DECODE_ROWS, least), max(prefill, least)
        self._device = device
        self._attend_kernel, self._combine_kernel = (
            Launcher(kernel) for kernel in (attention.attend, attention.combine)
        )
        self._metadata: AttentionMetadata | None = None
        self._inputs: AttentionInputs | None = None

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
        inputs = self.inputs(metadata)
        rows = blocks.view(-1, *key.shape[1:])
        rows.index_copy_(0, inputs.slots, key)
        rows.index_copy_(0, inputs.slots + self.block_size, value)
        return self.attend(query.contiguous(), blocks, inputs, sliding_window, scaling)

    def attend(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        inputs: AttentionInputs,
        sliding_window: int | None,
        scaling: float,
    ) -> torch.Tensor:
        """Attend after K and V of the new tokens are stored; returns [tokens, head, head_dim]."""
        attended = torch.empty_like(query)
        for tiles in inputs.tiles:
            self._attend(query, blocks, inputs, tiles, sliding_window, scaling, attended)
        return attended

    def inputs(self, metadata: AttentionMetadata) -> AttentionInputs:
        """Return the inputs of the iteration, computed once for all layers."""
        if self._inputs is None or metadata is not self._metadata:
            self._metadata, self._inputs = metadata, self._inputs_of(metadata)
        return self._inputs

    def compile_combine(self, like: torch.Tensor) -> None:
        """Compile `combine` for every number of splits; `like` has the dtype of activations."""
        none = torch.zeros(2, dtype=torch.int64, device=like.device)
        attended = like.new_zeros(1, self.num_heads, self.head_dim)
        splits = 2
        while splits <= SPLITS_MAX:
            parts = like.new_zeros(splits, self.num_heads, self.head_dim, dtype=torch.float32)
            # A tile of 0 tokens: the kernel is compiled and does nothing.
            self._combine_kernel(
                (1, 1, self.num_heads),
                (parts, parts, attended, none, none, splits, 1),
                *(self.num_heads, self.head_dim, splits),
            )
            splits *= 2

    def _attend(
        self,
        query: torch.Tensor,
        blocks: torch.Tensor,
        inputs: AttentionInputs,
        tiles: Tiles,
        window: int | None,
        scaling: float,
        attended: torch.Tensor,
    ) -> None:
        share, splits = tiles.split(self.num_kv_heads, window)
        # Without splits, the kernel writes the result directly and does not use `weights`.
        parts, weights = attended, attended
        if splits > 1:
            shape = (len(tiles.starts), tiles.most, self.num_heads, splits)
            parts = query.new_empty(*shape, self.head_dim, dtype=torch.float32)
            weights = query.new_empty(shape, dtype=torch.float32)
        wide = query.dtype.itemsize > 2
        self._attend_kernel(
            (len(tiles.starts), self.num_kv_heads, splits),
            (
                *(query, blocks, inputs.tables),
                *(tiles.starts, tiles.counts, tiles.positions, tiles.firsts, tiles.lowests),
                *(parts, weights, scaling * LOG2_E, share, splits, tiles.most, window or 0),
            ),
            *(self.num_heads, self.num_kv_heads, self._group, tiles.rows),
            *(self.head_dim, self.block_size, splits > 1, window is not None),
            TILE_TOKENS // 2 if wide else TILE_TOKENS,
            num_warps=8 if tiles.rows == PREFILL_ROWS else 4,
            num_stages=1 if wide else 3,
        )
        # The second pass of flash decoding merges the partial results.
        if splits > 1:
            self._combine_kernel(
                (len(tiles.starts), tiles.most, self.num_heads),
                (parts, weights, attended, tiles.starts, tiles.counts, splits, tiles.most),
                *(self.num_heads, self.head_dim, triton.next_power_of_2(splits)),
            )

    def _inputs_of(self, metadata: AttentionMetadata) -> AttentionInputs:
        # Tokens per prefill tile: a program's rows are tokens × the heads of a group.
        each = self._prefill_rows // self._group
        columns = [*single_tiles(metadata.spans), *longer_tiles(metadata.spans, each)]
        *parts, tables, slots = to_device(
            [*columns, metadata.tables, metadata.slots_of_keys], self._device
        )
        kinds = (
            (columns[:5], parts[:5], self.decode_rows),
            (columns[5:], parts[5:], self._prefill_rows),
        )
        tiles = []
        for (_, host_counts, host_positions, _, _), there, rows in kinds:
            if len(host_counts):
                starts, counts, positions, firsts, lowests = there
                lengths, most = host_positions + host_counts, int(host_counts.max())
                tiles.append(Tiles(starts, counts, positions, firsts, lowests, lengths, rows, most))
        return AttentionInputs(slots, tables, tuple(tiles))


def to_device(columns: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy int64 `columns` to the device in a single transfer."""
    # Align each column to 16 bytes, because Triton would compile another kernel for other pointers.
    sizes = [len(column) + len(column) % 2 for column in columns]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    for column, place in zip(columns, host.split(sizes), strict=True):
        place.numpy()[: len(column)] = column
    copies = host.to(device, non_blocking=True).split(sizes)
    return [copy[: len(column)] for copy, column in zip(copies, columns, strict=True)]


def single_tiles(spans: np.ndarray) -> Sequence[np.ndarray]:
    """Return a tile per single-token span: starts, counts, positions, firsts, lowests.

    See `Tiles`.
    """
    start, count, position, first, _, sharing = spans[spans[:, 1] == 1].T
    return start, count, position, first, np.maximum(sharing - 1, 0)


def longer_tiles(spans: np.ndarray, tile_tokens: int) -> Sequence[np.ndarray]:
    """Return the longer spans, cut into tiles of at most `tile_tokens`; see `single_tiles`."""
    spans = spans[spans[:, 1] > 1]
    # `owner`: the span of each tile. `done`: the tokens of that span in earlier tiles.
    pieces = -(-spans[:, 1] // tile_tokens)
    owner = np.repeat(np.arange(len(spans)), pieces)
    done = (np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * tile_tokens
    start, count, position, first = spans[owner, :4].T
    lowest = np.zeros_like(start)
    return start + done, np.minimum(count - done, tile_tokens), position + done, first, lowest
