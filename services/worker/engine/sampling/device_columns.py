"""Parameters of rows of logits as the kernels of a GPU read them (columns of `token_places`)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.worker.engine.model.gpu_kernels import token_places
from services.worker.engine.sampling.device_row import DeviceRow

WORD_BITS = 32


class WindowLimits(NamedTuple):
    """The tokens to want in a window: exactly top-k up to `top_k`, else `nucleus`.

    So few of the lanes that a window rarely receives more tokens than it has room for.
    """

    top_k: int
    nucleus: int

    @classmethod
    def of(cls, lanes: int, room: int) -> "WindowLimits":
        """The limits for rows of `lanes` lanes and windows with `room`."""
        return cls(max(1, min(room, lanes) // 2), max(1, min(room // 2, lanes // 4)))


class RowInputs(NamedTuple):
    """Inputs of a launch: `columns` int64 [COLUMNS, rows], `entries` int64 (see `adjust`).

    `masks`: int32 [masked rows, width].
    """

    columns: npt.NDArray[np.int64]
    entries: npt.NDArray[np.int64]
    masks: npt.NDArray[np.int32]

    @property
    def nuclei(self) -> bool:
        """Whether top-p selects tokens of a whole row."""
        ranked = self.columns[token_places.WANTED] > 0
        return bool((ranked & (self.columns[token_places.TOP_K] == 0)).any())


def row_inputs(
    rows: Sequence[DeviceRow], slots: Sequence[int], vocab_size: int, limits: WindowLimits
) -> RowInputs:
    """Return the inputs of `rows`; `slots` are the slots of the rows with counts, in order."""
    columns = np.zeros((token_places.COLUMNS, len(rows)), np.int64)
    columns[token_places.SOURCE] = np.arange(len(rows))
    columns[token_places.SLOT] = columns[token_places.MASK] = -1
    _fill_draws(columns, rows, vocab_size, limits)
    counted = [(place, row.counts) for place, row in enumerate(rows) if row.counts is not None]
    if counted:
        at = [place for place, _ in counted]
        used = [counts.sampling for _, counts in counted]
        columns[token_places.SLOT, at] = slots
        numbers = columns.view(np.float64)
        numbers[token_places.REPETITION, at] = [sampling.repetition_penalty for sampling in used]
        numbers[token_places.FREQUENCY, at] = [sampling.frequency_penalty for sampling in used]
        numbers[token_places.PRESENCE, at] = [sampling.presence_penalty for sampling in used]
    masks = _fill_masks(columns, rows, vocab_size)
    return RowInputs(columns, _fill_entries(columns, rows), masks)


def score_columns(scored: Sequence[int], top: int) -> npt.NDArray[np.int64]:
    """Return the columns that score the rows `scored` of the logits with `top` alternatives."""
    columns = np.zeros((token_places.COLUMNS, len(scored)), np.int64)
    columns[token_places.SOURCE] = scored
    columns[token_places.WANTED] = top
    numbers = columns.view(np.float64)
    numbers[token_places.TEMPERATURE] = 1.0
    numbers[token_places.LOG_MIN_P] = -np.inf
    return columns


def _fill_draws(
    columns: npt.NDArray[np.int64],
    rows: Sequence[DeviceRow],
    vocab_size: int,
    limits: WindowLimits,
) -> None:
    temperature, top_k, top_p, min_p = np.array([row.terms for row in rows]).T
    numbers = columns.view(np.float64)
    numbers[token_places.TEMPERATURE] = temperature
    numbers[token_places.TOP_P] = top_p
    with np.errstate(divide="ignore"):
        numbers[token_places.LOG_MIN_P] = np.log(min_p)
    numbers[token_places.NUMBER] = [row.number for row in rows]
    top_k = np.where(top_k < vocab_size, np.maximum(top_k, 0), 0)
    columns[token_places.TOP_K] = top_k
    wanted = np.where((top_k > 0) & (top_k <= limits.top_k), top_k, limits.nucleus)
    ranked = (temperature > 0) & ((top_k > 0) | (top_p < 1))
    columns[token_places.WANTED] = np.where(ranked, wanted, 0)


def _fill_masks(
    columns: npt.NDArray[np.int64], rows: Sequence[DeviceRow], vocab_size: int
) -> npt.NDArray[np.int32]:
    """Pack the masks of allowed tokens, a bit per token."""
    width = -(-vocab_size // WORD_BITS)
    masked = [
        (place, row.forbidden.allowed)
        for place, row in enumerate(rows)
        if row.forbidden is not None and row.forbidden.allowed is not None
    ]
    masks = np.zeros((len(masked), width), np.int32)
    packed = masks.view(np.uint8)
    for number, (place, allowed) in enumerate(masked):
        bits = np.packbits(allowed, bitorder="little")
        packed[number, : len(bits)] = bits
        columns[token_places.MASK, place] = number
    return masks


def _fill_entries(
    columns: npt.NDArray[np.int64], rows: Sequence[DeviceRow]
) -> npt.NDArray[np.int64]:
    """Concatenate the biases and banned tokens of all rows."""
    parts: list[npt.NDArray[np.int64]] = []
    end = 0
    for place, row in enumerate(rows):
        banned = row.forbidden.ids if row.forbidden is not None else []
        if row.bias is None and not banned:
            continue
        columns[token_places.BIASES, place] = end
        if row.bias is not None:
            ids, values = row.bias
            bits = values.astype(np.float32).view(np.int32).astype(np.int64)
            parts.append((bits << 32) | ids)
            end += len(ids)
        columns[token_places.BANS, place] = end
        parts.append(np.array(banned, np.int64))
        end += len(banned)
        columns[token_places.END, place] = end
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)
