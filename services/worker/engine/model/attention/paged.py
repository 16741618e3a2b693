"""The interface of paged attention, and the metadata that all layers of an iteration share.

A layer's KV cache is [block, 2, slot, kv_head, head_dim]. It is also viewed per token as
[block × 2 × slot, kv_head, head_dim] (*slots* below), and per half block as
[block × 2, slot × kv_head × head_dim] (*halves*: K of block b is half 2b, V is half 2b + 1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np
import torch

from services.core.planner.batch import Batch, Chunk
from services.core.request import blocks_for
from services.worker.errors import InvalidBatch

GROUP_TOKENS = 2048
"""Maximum padded context tokens of a decode group; a single longer sequence is a group of its own.
The float32 K and V of a group (3 MiB for SmolLM2) fit the caches of a core. Of 1,024 to 4,096
tokens, this measured best."""
SHARED = -1
"""In `AttentionMetadata.spans`, last column: another sequence has entries in the last block, which
must not be cleared. 0: the sequence has the block alone. Positive: the tail is turned."""
GROUP_PADDING_TOKENS = 256
"""Maximum padding of a sequence in a decode group."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length that decode a token each, in a single attention call.

    `rows` [sequences]: rows in the batch. `halves` [2 × sequences × blocks]: half blocks, all K
    before all V. `mask` [sequences, 1, 1, blocks × slot]: 0 for visible keys, -inf elsewhere.
    """

    rows: torch.Tensor
    halves: torch.Tensor
    mask: torch.Tensor


class Decode(NamedTuple):
    """A decode step: row in the batch, and the positions that it sees in the blocks of `table`."""

    row: int
    first: int
    last: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive rows `first_row .. first_row + rows - 1` of a sequence in prefill.

    The first row has position `start`. `halves` [2 × blocks] covers the positions from `base` (a
    multiple of the block size) to the last row's position.
    """

    first_row: int
    rows: int
    start: int
    base: int
    halves: torch.Tensor


class AttentionMetadata:
    """Attention inputs that all layers of an iteration share; `MetadataBuilder` creates them.

    `spans` int64 [sequences, 6]: first row in the batch, number of rows, position of the first row,
    offset of the sequence's blocks in `tables`, 1 for a decode step, and how the sequence shares
    its last block (`SHARED`). `tables` int64: the block ids of all sequences up to their last rows.
    Properties are computed on first use, because each backend needs only some.

    The entries of a turned tail (`core/planner/shared_tails.py`) are the last of their block. Its
    block comes first in `tables`, before full ones, so that the sequence sees the positions from
    n to the end of the last block: then the last column is n + 1, the new token is stored at n, and
    the position of the row is that of the last slot.
    """

    def __init__(
        self,
        spans: np.ndarray,
        tables: np.ndarray,
        block_size: int,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> None:
        self.spans = spans
        self.tables = tables
        self._block_size = block_size
        self._device = device
        self._compute_dtype = compute_dtype
        self._groups: dict[int | None, tuple[DecodeGroup, ...]] = {}
        self._prefills: dict[int | None, tuple[PrefillSpan, ...]] = {}

    @cached_property
    def slots_of_keys(self) -> np.ndarray:
        """[tokens]: K's slot of each token, on the host; V's slot is `block_size` higher."""
        # `owner`: the span of each token. `within`: its offset in that span.
        rows = self.spans[:, 1]
        owner = np.repeat(np.arange(len(rows)), rows)
        within = np.arange(len(owner)) - self.spans[owner, 0]
        # A turned tail grows downwards from its lowest entry.
        places = np.where(self.spans[:, 5] > 0, self.spans[:, 5] - 1, self.spans[:, 2])
        block, slot = np.divmod(places[owner] + within, self._block_size)
        return self.tables[self.spans[owner, 3] + block] * (2 * self._block_size) + slot

    @cached_property
    def slots(self) -> torch.Tensor:
        """[2 × tokens]: the K slots of all tokens, then the V slots."""
        slots = self.slots_of_keys
        return self._tensor(np.concatenate([slots, slots + self._block_size]))

    @cached_property
    def begun_blocks(self) -> torch.Tensor | None:
        """Blocks whose first slot this iteration writes, and not the last; None without any.

        The backend must clear them: attention reads whole blocks, and masked values must be finite.
        """
        begun = []
        for _, rows, start, first_block, _, sharing in self.spans:
            last, left = divmod(start + rows, self._block_size)
            if left and start <= last * self._block_size and sharing != SHARED:
                begun.append(self.tables[first_block + last])
        return self._tensor(np.array(begun)) if begun else None

    def decode_groups(self, window: int | None) -> tuple[DecodeGroup, ...]:
        """Return the decode steps in groups, for layers with this sliding window (None: full)."""
        if window not in self._groups:
            decodes = [
                Decode(span[0], max(0, span[5] - 1), span[2] - base, table)
                for span, base, table in self._visible(window)
                if span[4]
            ]
            grouped = group_by_length(decodes, self._block_size)
            self._groups[window] = tuple(self._group(members, window) for members in grouped)
        return self._groups[window]

    def prefill_spans(self, window: int | None) -> tuple[PrefillSpan, ...]:
        """Return the prefill chunks, for layers with this sliding window (None: full)."""
        if window not in self._prefills:
            self._prefills[window] = tuple(
                PrefillSpan(span[0], span[1], span[2], base, self._tensor(_halves(table)))
                for span, base, table in self._visible(window)
                if not span[4]
            )
        return self._prefills[window]

    def _visible(self, window: int | None) -> Iterator[tuple[list[int], int, np.ndarray]]:
        """Yield each span, its first visible position (rounded down to a block) and its blocks."""
        for span in self.spans.tolist():
            _, rows, start, first_block, _, _ = span
            skipped = 0 if window is None else max(0, start - window + 1) // self._block_size
            end = first_block + blocks_for(start + rows, self._block_size)
            yield span, skipped * self._block_size, self.tables[first_block + skipped : end]

    def _group(self, members: Sequence[Decode], window: int | None) -> DecodeGroup:
        width = len(members[0].table)
        tables = np.empty((len(members), width), dtype=np.int64)
        for padded, member in zip(tables, members, strict=True):
            # Pad with the sequence's own first block, which has finite values; the mask hides them.
            padded[:] = member.table[0]
            padded[: len(member.table)] = member.table
        first, last = np.array([(member.first, member.last) for member in members]).T[:, :, None]
        slot = np.arange(width * self._block_size)
        hidden = (slot < first) | (slot > last)
        if window is not None:
            hidden |= slot <= last - window
        mask = np.where(hidden, -np.inf, 0.0)[:, None, None, :]
        return DecodeGroup(
            rows=self._tensor(np.array([member.row for member in members])),
            halves=self._tensor(_halves(tables)),
            mask=torch.from_numpy(mask).to(self._device, self._compute_dtype),
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)


class PagedAttention(Protocol):
    """Causal grouped-query attention over a paged KV cache; the backends implement it."""

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
        """Store K and V of the new tokens in `blocks`, then attend.

        `query` [tokens, head, head_dim], `key` and `value` [tokens, kv_head, head_dim] are in the
        compute dtype; `blocks` [block, 2, slot, kv_head, head_dim] is in the storage dtype. Returns
        [tokens, head, head_dim].
        """


@dataclass(frozen=True, slots=True)
class MetadataBuilder:
    """Builds the attention metadata of batches on `device`; masks have the compute dtype."""

    block_size: int
    device: torch.device
    compute_dtype: torch.dtype

    def build(self, batch: Batch, num_blocks: int) -> AttentionMetadata:
        """Build the metadata of `batch`. Raises InvalidBatch if a block table is invalid."""
        spans = np.empty((len(batch.chunks), 6), dtype=np.int64)
        needed = [self._needed_blocks(chunk) for chunk in batch.chunks]
        row = first_block = 0
        for span, chunk, blocks in zip(spans, batch.chunks, needed, strict=True):
            rows = len(chunk.token_ids)
            # A single prompt token counts as prefill, not as a decode step: the two paths round
            # differently, and results must not depend on the cuts of the prompt into chunks.
            decodes = rows == 1 and chunk.sample is not None and chunk.sample.index > 0
            span[:] = row, rows, chunk.start, first_block, decodes, 0
            row, first_block = row + rows, first_block + blocks
        used = [
            chunk.block_ids[:blocks] for chunk, blocks in zip(batch.chunks, needed, strict=True)
        ]
        if batch.turned or batch.shared:
            self._share_tails(batch, spans, used)
        tables = np.fromiter(chain.from_iterable(used), np.int64, first_block)
        # Kernels do not check bounds: an invalid id would corrupt memory.
        if tables.min() < 0 or tables.max() >= num_blocks:
            outside = np.flatnonzero((tables < 0) | (tables >= num_blocks))[0]
            index = int(np.searchsorted(spans[:, 3], outside, "right")) - 1
            name = batch.chunks[index].seq_id
            raise InvalidBatch(f"request {name}: a block id is outside the KV cache")
        return AttentionMetadata(spans, tables, self.block_size, self.device, self.compute_dtype)

    def _share_tails(self, batch: Batch, spans: np.ndarray, used: list[tuple[int, ...]]) -> None:
        """Describe shared last blocks; the blocks of turned tails come first in `used`."""
        for index, (span, chunk) in enumerate(zip(spans, batch.chunks, strict=True)):
            if chunk.seq_id in batch.shared:
                span[5] = SHARED
            elif chunk.seq_id in batch.turned:
                blocks = used[index]
                used[index] = (blocks[-1], *blocks[:-1])
                span[2] = len(blocks) * self.block_size - 1
                span[5] = self.block_size - chunk.start % self.block_size

    def _needed_blocks(self, chunk: Chunk) -> int:
        """Number of blocks up to the chunk's last token. Raises InvalidBatch."""
        needed = blocks_for(chunk.start + len(chunk.token_ids), self.block_size)
        if not chunk.token_ids or len(chunk.block_ids) < needed:
            raise InvalidBatch(f"request {chunk.seq_id}: the block table is too short")
        return needed


def group_by_length(members: Sequence[Decode], block_size: int) -> list[list[Decode]]:
    """Split decode steps into groups of similar context length, longest first.

    A group is padded to its longest context, so similar lengths keep padding small.
    """
    group_blocks = GROUP_TOKENS // block_size
    padding_blocks = GROUP_PADDING_TOKENS // block_size
    groups: list[list[Decode]] = []
    width = 0
    for member in sorted(members, key=lambda member: -len(member.table)):
        blocks = len(member.table)
        fits = groups and (len(groups[-1]) + 1) * width <= group_blocks
        if fits and width - blocks <= padding_blocks:
            groups[-1].append(member)
        else:
            groups.append([member])
            width = blocks
    return groups


def _halves(tables: np.ndarray) -> np.ndarray:
    """Return the half-block ids of `tables` (any shape), flattened: all K, then all V."""
    flat = tables.reshape(-1)
    return np.concatenate([2 * flat, 2 * flat + 1])
