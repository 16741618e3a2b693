"""The contract of paged attention, and the metadata that all layers of an iteration share.

A layer's KV cache is [block, 2, slot, kv_head, head_dim]. Seen as rows of one token it is
[block × 2 × slot, kv_head, head_dim] (the *slots* below), seen as half blocks it is
[block × 2, slot × kv_head × head_dim] (K of block b is half 2b, V is 2b + 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from services.core.planner.batch import Batch, Chunk
from services.core.request import blocks_for
from services.worker.errors import InvalidBatch

GROUP_TOKENS = 2048
"""Padded context tokens of one decode group. Its float32 K/V (3 MiB for SmolLM2) fits into
the caches of a core; measured best between 1,024 and 4,096."""
GROUP_PADDING_TOKENS = 256
"""The most padding with which a sequence joins a decode group."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences of similar length that decode one token each, in one attention call.

    `rows` [sequences]: their rows in the batch. `halves` [2 × sequences × blocks]: half blocks, all
    K before all V. `mask` [sequences, 1, 1, blocks × slot]: 0 where a key counts, -inf elsewhere.
    """

    rows: torch.Tensor
    halves: torch.Tensor
    mask: torch.Tensor


class Decode(NamedTuple):
    """A sequence that decodes one token: row in the batch, position in `table`, visible blocks."""

    row: int
    position: int
    table: np.ndarray


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive rows `first_row .. first_row + rows - 1` of one sequence.

    The first row has position `start`. `halves` [2 × blocks] covers the positions from `base` (a
    multiple of the block size) to that of the last row.
    """

    first_row: int
    rows: int
    start: int
    base: int
    halves: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Which tokens attend to which, for the layers with one sliding window (None: none)."""

    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillSpan, ...]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The metadata of one iteration, for all layers.

    `slots` [2 × tokens]: the slots for K, then V, of each token. `begun_blocks`: blocks whose first
    slot is written now and whose last is not; they are cleared, so that padding is finite.
    """

    slots: torch.Tensor
    begun_blocks: torch.Tensor | None
    plans: dict[int | None, AttentionPlan]


class PagedAttention(Protocol):
    """Causal grouped-query attention over a paged KV cache."""

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
        """Store K and V of the new tokens, then attend.

        `query` [tokens, head, head_dim], `key` and `value` [tokens, kv_head, head_dim] in the
        compute dtype; `blocks` [block, 2, slot, kv_head, head_dim] in the storage dtype, written
        in place. Returns [tokens, head, head_dim].
        """


@dataclass(frozen=True, slots=True)
class MetadataBuilder:
    """Turns batches into metadata on `device`; masks have the compute dtype."""

    block_size: int
    sliding_windows: frozenset[int | None]
    device: torch.device
    compute_dtype: torch.dtype

    def build(self, batch: Batch, num_blocks: int) -> AttentionMetadata:
        """Metadata of `batch`. Raises InvalidBatch when a table is short or outside the cache."""
        tables = [self._table(chunk, num_blocks) for chunk in batch.chunks]
        slots = np.concatenate(
            [self._slots(chunk, table) for chunk, table in zip(batch.chunks, tables, strict=True)]
        )
        begun = [
            int(table[-1])
            for chunk, table in zip(batch.chunks, tables, strict=True)
            if self._begins_last_block(chunk)
        ]
        return AttentionMetadata(
            slots=self._tensor(np.concatenate([slots, slots + self.block_size])),
            begun_blocks=self._tensor(np.array(begun)) if begun else None,
            plans={window: self._plan(batch, tables, window) for window in self.sliding_windows},
        )

    def _table(self, chunk: Chunk, num_blocks: int) -> np.ndarray:
        """Block ids up to the chunk's last token."""
        needed = blocks_for(chunk.start + len(chunk.token_ids), self.block_size)
        table = np.array(chunk.block_ids[:needed], dtype=np.int64)
        if not chunk.token_ids or len(table) < needed:
            raise InvalidBatch(f"request {chunk.request_id}: the block table is too short")
        if table.min() < 0 or table.max() >= num_blocks:
            raise InvalidBatch(f"request {chunk.request_id}: a block id is outside the KV cache")
        return table

    def _slots(self, chunk: Chunk, table: np.ndarray) -> np.ndarray:
        """Row of K in the slot view for each token."""
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids))
        block, slot = np.divmod(positions, self.block_size)
        return table[block] * (2 * self.block_size) + slot

    def _begins_last_block(self, chunk: Chunk) -> bool:
        end = chunk.start + len(chunk.token_ids)
        last_block_start = (end - 1) // self.block_size * self.block_size
        return chunk.start <= last_block_start and end % self.block_size != 0

    def _plan(
        self, batch: Batch, tables: Sequence[np.ndarray], window: int | None
    ) -> AttentionPlan:
        decodes: list[Decode] = []
        prefills: list[PrefillSpan] = []
        row = 0
        for chunk, table in zip(batch.chunks, tables, strict=True):
            rows = len(chunk.token_ids)
            first_seen = 0 if window is None else max(0, chunk.start - window + 1)
            skipped = first_seen // self.block_size
            base = skipped * self.block_size
            if rows == 1:
                decodes.append(Decode(row, chunk.start - base, table[skipped:]))
            else:
                halves = self._tensor(_halves(table[skipped:]))
                prefills.append(PrefillSpan(row, rows, chunk.start, base, halves))
            row += rows
        grouped = group_by_length(decodes, self.block_size)
        groups = tuple(self._group(members, window) for members in grouped)
        return AttentionPlan(groups, tuple(prefills))

    def _group(self, members: Sequence[Decode], window: int | None) -> DecodeGroup:
        width = len(members[0].table)
        tables = np.empty((len(members), width), dtype=np.int64)
        for padded, member in zip(tables, members, strict=True):
            # Padding repeats the sequence's own first block: finite values that the mask hides.
            padded[:] = member.table[0]
            padded[: len(member.table)] = member.table
        position = np.array([member.position for member in members])[:, None]
        slot = np.arange(width * self.block_size)
        hidden = slot > position
        if window is not None:
            hidden |= slot <= position - window
        mask = np.where(hidden, -np.inf, 0.0)[:, None, None, :]
        return DecodeGroup(
            rows=self._tensor(np.array([member.row for member in members])),
            halves=self._tensor(_halves(tables)),
            mask=torch.from_numpy(mask).to(self.device, self.compute_dtype),
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def group_by_length(members: Sequence[Decode], block_size: int) -> list[list[Decode]]:
    """Split decodes into groups of similar context, longest first, so that padding stays small."""
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
    """Half-block ids of `tables` (any shape), flat: all K, then all V."""
    flat = tables.reshape(-1)
    return np.concatenate([2 * flat, 2 * flat + 1])
