"""Token counts of penalized sequences in the memory of a GPU, which counts each token it samples.

A *slot* is a row of the counts. It mirrors the `TokenCounts` of a sequence, and is filled again if
it has another output: after a preemption, or if a sampled token was discarded.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.engine.sampling.rules import TokenCounts

INT16_TOKENS = 2**15
"""Shorter outputs have counts of 16 bits."""
_PROMPT_ONLY = -1


def counts_dtype(max_model_len: int) -> torch.dtype:
    """Return the dtype of counts of outputs of sequences of at most `max_model_len` tokens."""
    return torch.int16 if max_model_len <= INT16_TOKENS else torch.int32


@dataclass(slots=True)
class _CountSlot:
    """`output_tokens` are counted; `last` is the last of them, None while it is not known."""

    row: int
    counts: TokenCounts
    output_tokens: int
    last: int | None

    def mirrors(self, counts: TokenCounts) -> bool:
        """Whether the slot has the output of `counts`."""
        same = self.counts is counts and self.output_tokens == counts.output_tokens
        return same and self.last == counts.last


class DeviceCounts:
    """Assigns slots to sequences; the least recently used slot is assigned again."""

    def __init__(
        self, slots: int, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.table = torch.zeros(slots, vocab_size, dtype=dtype, device=device)
        self._slots: OrderedDict[str, _CountSlot] = OrderedDict()
        self._free = list(range(slots))

    def keep_only(self, seq_ids: Collection[str]) -> None:
        """Free the slots of sequences that are not in `seq_ids`."""
        for seq_id in [name for name in self._slots if name not in seq_ids]:
            self._free.append(self._slots.pop(seq_id).row)

    def rows_for(self, sequences: Sequence[tuple[str, TokenCounts]]) -> list[int]:
        """Return the rows of sequences, at most as many as slots, and count a token in each.

        The caller launches a kernel that counts this token, and reports it to `sampled`.
        """
        filled, rows = [], []
        for seq_id, counts in sequences:
            slot = self._slots.get(seq_id)
            if slot is None or not slot.mirrors(counts):
                slot = self._assign(seq_id, counts)
                filled.append(slot)
            self._slots.move_to_end(seq_id)
            rows.append(slot.row)
        if filled:
            self._fill(filled)
        for seq_id, _ in sequences:
            self._slots[seq_id].output_tokens += 1
            self._slots[seq_id].last = None
        return rows

    def sampled(self, seq_id: str, token_id: int) -> None:
        """Note the token that the kernel counted for a sequence."""
        if seq_id in self._slots:
            self._slots[seq_id].last = token_id

    def _assign(self, seq_id: str, counts: TokenCounts) -> _CountSlot:
        old = self._slots.pop(seq_id, None)
        if old is None:
            if not self._free:
                self._free.append(self._slots.popitem(last=False)[1].row)
            row = self._free.pop()
        else:
            row = old.row
        slot = self._slots[seq_id] = _CountSlot(row, counts, counts.output_tokens, counts.last)
        return slot

    def _fill(self, slots: Sequence[_CountSlot]) -> None:
        """Copy the counts of sequences to their slots."""
        rows = [slot.row for slot in slots]
        vocab_size, device = self.table.shape[1], self.table.device
        places = [slot.row * vocab_size + slot.counts.ids for slot in slots]
        numbers = [
            np.where(slot.counts.counts > 0, slot.counts.counts, _PROMPT_ONLY) for slot in slots
        ]
        host = np.concatenate([np.array(rows), *places, *numbers]).astype(np.int64)
        copied = pinned_copy(host, device)
        size = (len(host) - len(rows)) // 2
        self.table.index_fill_(0, copied[: len(rows)], 0)
        if size:
            at, values = copied[len(rows) :].split(size)
            self.table.view(-1).index_copy_(0, at, values.to(self.table.dtype))


def pinned_copy(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy an array to the device without waiting for it."""
    host = torch.from_numpy(values)
    # A copy from pageable memory would wait for all kernels launched before.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
