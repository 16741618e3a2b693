"""Samples rows of logits on a GPU by the kernels `logit_rules`, `token_draw` and `token_scores`.

All rows of a batch take the same few launches, whatever their parameters. The choice is that of the
host (`sampler.py`): scores have the same bits, and probabilities differ by 1e-7 at most, so that
tokens differ only where rounding decides. It does not depend on the batch, the kernel sizes or the
model of the GPU. Nothing waits for the device before the results are collected.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton

from services.core.logprobs import LogprobRows
from services.core.request import Sampling
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms
from services.worker.engine.model.gpu_kernels import (
    logit_rules,
    token_draw,
    token_places,
    token_scores,
)
from services.worker.engine.model.gpu_kernels.launcher import Launcher
from services.worker.engine.sampling.device_columns import WindowLimits, row_inputs, score_columns
from services.worker.engine.sampling.device_counts import DeviceCounts, counts_dtype, pinned_copy
from services.worker.engine.sampling.device_row import DeviceRow
from services.worker.engine.sampling.rules import ForbiddenTokens, TokenCounts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of logits. In float64 the host samples."""
ID_BITS = (20, 24)
"""Bits of a token id: for most vocabularies, and for all."""
WARPS = 8  # of 32 threads per program
MASKED, UNMASKED = -3.4e38, -float("inf")
"""Scores below them are no candidates: of draws, and of log probabilities."""


class KernelSizes(NamedTuple):
    """Tokens per span and lane (`token_places`), step of a loop, window, and wide window."""

    span: int = 4096
    lane: int = 32
    chunk: int = 512
    room: int = 2048
    wide_room: int = 16_384


GPU_SIZES = KernelSizes()


def device_sampler_bytes(vocab_size: int, rows: int, slots: int, max_model_len: int) -> int:
    """Return an upper bound of the memory of a `DeviceSampler`, and of a launch of `rows` rows."""
    sizes = GPU_SIZES
    spans = -(-vocab_size // sizes.span)
    scores, masks = 4 * vocab_size, vocab_size // 8 + 8
    lanes = 4 * spans * (sizes.span // sizes.lane)
    windows = 4 * (sizes.room + sizes.wide_room)
    row = scores + masks + lanes + windows + 16 * spans + 16 * token_places.COLUMNS + 64
    return rows * row + slots * vocab_size * counts_dtype(max_model_len).itemsize


class DeviceScores(NamedTuple):
    """Ranks and ids, and log probabilities, [rows, 1 + top] each, as in `LogprobRows`."""

    ids: torch.Tensor
    values: torch.Tensor

    def rows(self, tops: Sequence[int]) -> list[LogprobRows]:
        """Return each row with its number of alternatives."""
        ids, values = self.ids.numpy(), self.values.numpy()
        return [
            LogprobRows(top, ids[row, : 1 + top].tobytes(), values[row, : 1 + top].tobytes())
            for row, top in enumerate(tops)
        ]


@dataclass(frozen=True, slots=True)
class DeviceDraws:
    """Results of a launch on their way to the host; `copied` is None on a CPU."""

    rows: Sequence[DeviceRow]
    tokens: torch.Tensor
    scores: DeviceScores | None
    copied: torch.cuda.Event | None
    counts: DeviceCounts

    def collect(self) -> tuple[list[int], dict[int, LogprobRows]]:
        """Wait for the device; returns the tokens, −1 where none is left, and logprobs by row."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.tokens.tolist()
        for row, token in zip(self.rows, tokens, strict=True):
            if row.counts is not None:
                self.counts.sampled(row.seq_id, token)
        if self.scores is None:
            return tokens, {}
        tops = {
            place: row.top_logprobs
            for place, row in enumerate(self.rows)
            if row.top_logprobs is not None
        }
        return tokens, dict(zip(tops, self.scores.rows(list(tops.values())), strict=True))


class DeviceSampler:
    """Samples at most `rows_max` rows per launch. Not thread-safe.

    `slots`: the number of sequences whose token counts the device keeps, for penalties.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        rows_max: int,
        slots: int,
        max_model_len: int,
        device: torch.device,
        sizes: KernelSizes = GPU_SIZES,
    ) -> None:
        self.rows_max = min(rows_max, slots)
        self._vocab_size, self._sizes, self._device = vocab_size, sizes, device
        self._spans = -(-vocab_size // sizes.span)
        self._lanes = self._spans * (sizes.span // sizes.lane)
        self._limits = WindowLimits.of(self._lanes, sizes.room)
        self._id_bits = next(bits for bits in ID_BITS if vocab_size <= 1 << bits)
        self._span_width = triton.next_power_of_2(self._spans)
        self._counts = DeviceCounts(slots, vocab_size, counts_dtype(max_model_len), device)
        # Without fused multiply-adds, operations in float32 have the bits of the host's.
        self._penalize, self._peaks, self._threshold, self._weigh = (
            Launcher(kernel, num_warps=WARPS, enable_fp_fusion=False)
            for kernel in (
                *(logit_rules.penalize, token_draw.peaks),
                *(token_draw.threshold, token_draw.weigh),
            )
        )
        self._widen, self._choose, self._score = (
            Launcher(kernel, num_warps=WARPS, enable_fp_fusion=False)
            for kernel in (token_draw.widen, token_draw.choose, token_scores.score)
        )
        self._adjust = Launcher(logit_rules.adjust)

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(self.rows_max, *shape, dtype=dtype, device=device)

        # All kernels run in the same stream, so that launches can share this memory.
        self._lane_peaks = empty(torch.float32, self._lanes)
        self._span_peaks, self._span_best, self._span_masses = (
            empty(dtype, self._spans) for dtype in (torch.float32, torch.int32, torch.int64)
        )
        self._no_mask = torch.zeros(1, dtype=torch.int32, device=device)
        self._row_peaks, self._thresholds = empty(torch.float32), empty(torch.float32)
        self._window_sizes, self._wide_sizes = empty(torch.int32), empty(torch.int32)
        self._window_masses = empty(torch.int64)
        self._window = empty(torch.int32, sizes.room)
        self._wide = empty(torch.int32, sizes.wide_room)

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether the kernels support the dtype of `logits`."""
        return logits.dtype in DTYPES

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile all kernels for logits in `dtype`, about a second each."""
        logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        counts = TokenCounts(Sampling(repetition_penalty=2.0), (0,))
        plain = DeviceRow("warm-up", DrawTerms(1.0, 0, 0.5, 0.0), 0.0, top_logprobs=1)
        for row in (plain, plain._replace(counts=counts, forbidden=ForbiddenTokens(None, [1]))):
            self.launch(logits, [row]).collect()
        self.keep_only(())

    def keep_only(self, seq_ids: Collection[str]) -> None:
        """Free the slots of sequences that are not in `seq_ids`."""
        self._counts.keep_only(seq_ids)

    def launch(self, logits: torch.Tensor, rows: Sequence[DeviceRow]) -> DeviceDraws:
        """Sample a token from each row of `logits` [rows, vocab], which is not changed."""
        logits = _aligned(logits)
        counted = [(row.seq_id, row.counts) for row in rows if row.counts is not None]
        slots = self._counts.rows_for(counted) if counted else []
        inputs = row_inputs(rows, slots, self._vocab_size, self._limits)
        scored = [place for place, row in enumerate(rows) if row.top_logprobs is not None]
        top = max((rows[place].top_logprobs or 0 for place in scored), default=0)
        columns, entries, score_inputs = self._copied(
            inputs.columns, inputs.entries, score_columns(scored, top)
        )
        scores = logits
        if any(row.changes for row in rows):
            scores = self._changed(logits, columns, inputs.masks)
            if len(inputs.entries):
                arguments = (scores, columns, entries, len(rows), self._vocab_size)
                self._adjust((len(rows),), arguments, self._sizes.chunk)
        self._find_peaks(scores, columns, len(rows))
        if any(row.terms.temperature for row in rows):
            self._weigh_tokens(scores, columns, len(rows), MASKED)
        if inputs.nuclei:
            self._widen_windows(scores, columns, len(rows))
        tokens = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        self._choose(
            (len(rows),),
            (
                *(scores, columns, self._row_peaks, self._thresholds, self._window_sizes),
                *(self._span_masses, self._window_masses, self._window, self._wide),
                *(self._wide_sizes, self._span_peaks, self._span_best, self._counts.table),
                *(tokens, len(rows), self._vocab_size, self._spans),
                *(self._sizes.room, self._sizes.wide_room),
            ),
            *(self._sizes.span, self._span_width, self._id_bits, self._sizes.chunk),
        )
        token_logprobs = None
        if scored:
            token_logprobs = self._scores(logits, score_inputs, len(scored), tokens, top)
        return DeviceDraws(rows, _to_host(tokens), token_logprobs, self._recorded(), self._counts)

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], top: int) -> LogprobRows:
        """Return log probabilities of `token_ids[i]` and the `top` best tokens at row i.

        At most `rows_max` rows. Waits for the device.
        """
        rows, logits = len(token_ids), _aligned(logits)
        columns, tokens = self._copied(
            score_columns(range(rows), top), np.array(token_ids, np.int64)
        )
        scores = self._scores(logits, columns, rows, tokens, top)
        copied = self._recorded()
        if copied is not None:
            copied.synchronize()
        return LogprobRows(top, scores.ids.numpy().tobytes(), scores.values.numpy().tobytes())

    def _copied(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Copy int64 arrays to the device in a single transfer, flattened."""
        # Align each to 16 bytes, because Triton would compile another kernel for other pointers.
        sizes = [array.size + array.size % 2 for array in arrays]
        host = np.zeros(sum(sizes), np.int64)
        begin = 0
        for array, size in zip(arrays, sizes, strict=True):
            host[begin : begin + array.size] = array.ravel()
            begin += size
        return list(pinned_copy(host, self._device).split(sizes))

    def _changed(
        self, logits: torch.Tensor, columns: torch.Tensor, masks: np.ndarray
    ) -> torch.Tensor:
        """Return the logits with penalties and masks in float32."""
        rows = len(logits)
        scores = torch.empty(logits.shape, dtype=torch.float32, device=self._device)
        masks_there = pinned_copy(masks, self._device) if len(masks) else self._no_mask
        self._penalize(
            (rows, self._spans),
            (
                *(logits, scores, columns, self._counts.table, masks_there),
                *(rows, self._vocab_size, masks.shape[1]),
            ),
            self._sizes.span,
        )
        return scores

    def _find_peaks(self, scores: torch.Tensor, columns: torch.Tensor, rows: int) -> None:
        """Find the maxima of rows, spans and lanes, and the thresholds of windows."""
        self._peaks(
            (rows, self._spans),
            (
                *(scores, columns, self._lane_peaks, self._span_peaks, self._span_best),
                *(rows, self._vocab_size, self._lanes, self._spans),
            ),
            *(self._sizes.span, self._sizes.lane),
        )
        self._threshold(
            (rows,),
            (
                *(columns, self._lane_peaks, self._span_peaks, self._row_peaks),
                *(self._thresholds, self._window_sizes, self._window_masses, self._wide_sizes),
                *(rows, self._lanes, self._spans),
            ),
            *(self._span_width, triton.next_power_of_2(self._lanes)),
        )

    def _weigh_tokens(
        self, scores: torch.Tensor, columns: torch.Tensor, rows: int, lowest: float
    ) -> None:
        """Compute the masses of spans, and fill the windows."""
        self._weigh(
            (rows, self._spans),
            (
                *(scores, columns, self._row_peaks, self._thresholds, self._window_sizes),
                *(self._span_masses, self._window_masses, self._window, rows),
                *(self._vocab_size, self._spans, self._sizes.room),
            ),
            *(self._sizes.span, lowest),
        )

    def _widen_windows(self, scores: torch.Tensor, columns: torch.Tensor, rows: int) -> None:
        """Fill the wide windows of rows whose windows do not suffice."""
        self._widen(
            (rows, self._spans),
            (
                *(scores, columns, self._row_peaks, self._thresholds, self._window_sizes),
                *(self._span_masses, self._window_masses, self._wide, self._wide_sizes),
                *(rows, self._vocab_size, self._spans),
                *(self._sizes.room, self._sizes.wide_room),
            ),
            *(self._sizes.span, self._span_width),
        )

    def _scores(
        self, logits: torch.Tensor, columns: torch.Tensor, rows: int, tokens: torch.Tensor, top: int
    ) -> DeviceScores:
        """Score `tokens` of the raw logits in the rows of `columns`."""
        self._find_peaks(logits, columns, rows)
        self._weigh_tokens(logits, columns, rows, UNMASKED)
        ids = torch.empty(rows, 1 + top, dtype=torch.int32, device=self._device)
        values = torch.empty(rows, 1 + top, dtype=torch.float32, device=self._device)
        self._score(
            (rows,),
            (
                *(logits, columns, self._row_peaks, self._window_sizes, self._span_masses),
                *(self._window, tokens, ids, values, rows, self._vocab_size, self._spans),
                *(self._sizes.room, top),
            ),
            *(self._span_width, self._id_bits, self._sizes.chunk),
        )
        return DeviceScores(_to_host(ids), _to_host(values))

    def _recorded(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def _aligned(logits: torch.Tensor) -> torch.Tensor:
    """Return `logits` at an address that kernels can read, see `Launcher`: a copy of odd slices."""
    return logits.clone() if logits.data_ptr() % 16 else logits


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned memory without waiting for it."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
