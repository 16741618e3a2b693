"""How likely tokens were, and which tokens were most likely, from rows of raw logits."""

from collections.abc import Sequence
from functools import cache
from math import log

import numpy as np

from services.worker.engine.model.cpu_kernels.candidates import (
    Scratch,
    gather,
    lane_edge,
    lane_peaks,
    lead,
)
from services.worker.engine.model.cpu_kernels.compiler import compiled
from services.worker.engine.model.cpu_kernels.kernel import Kernel
from services.worker.engine.model.cpu_kernels.weights import element, mass_of

_SIGNATURE = (
    "void({real}[:, ::1], int64[::1], int64[::1], {real}[::1], int32[::1], {real}[::1],"
    " float64[::1], int32[:, ::1], float64[:, ::1])"
)


def _score(  # type: ignore[no-untyped-def]
    logits, rows, tokens, lanes, ids, values, weights, found_ids, found
):
    """`found_ids` and `found` [row, 1 + top]: those of the token first, then of the best ones."""
    top = found.shape[1] - 1
    for index in range(len(rows)):
        row = logits[rows[index]]
        peak = lane_peaks(row, lanes)
        one = element(1.0, row)
        base = peak + log(mass_of(row, peak, one, element(-np.inf, row)))
        own, better = row[tokens[index]], 0
        for token in range(len(row)):
            better += 1 if row[token] > own else 0
        found_ids[index, 0], found[index, 0] = 1 + better, own - base
        if top:
            edge = lane_edge(lanes, top, ids, values, weights)
            count = gather(row, element(edge, row), ids)
            for place in range(count):
                values[place], weights[place] = row[ids[place]], 1.0
            lead(ids, values, weights, count, float(top), False)
            for place in range(top):
                # There are fewer only if logits are no numbers.
                found_ids[index, 1 + place] = ids[place] if place < count else place
                found[index, 1 + place] = values[place] - base if place < count else np.nan


@cache
def _kernel(real: str) -> Kernel:
    kernel = compiled(_SIGNATURE.format(real=real))(_score)
    kernel.load()
    return kernel


# Few models are computed in float64.
_kernel("float32")


class TokenScorer:
    """Scores rows of one vocabulary; for one thread, as its `scratch`."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._kernel = _kernel(scratch.dtype)

    def __call__(
        self, logits: np.ndarray, rows: Sequence[int], tokens: Sequence[int], top: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """How likely `tokens[i]` was after row `rows[i]` of `logits` [any, vocab].

        Returns int32 [rows, 1 + top]: the rank of the token, from 1, and the ids of the `top` best
        ones, best first; and their log probabilities, float64 of the same shape. Weights have the
        dtype of the logits and are summed in float64. Raises ValueError for logits that do not fit.
        """
        self._scratch.check(logits)
        ids = np.empty((len(rows), 1 + top), np.int32)
        values = np.empty(ids.shape)
        self._kernel(
            np.ascontiguousarray(logits),
            np.array(rows, np.int64),
            np.array(tokens, np.int64),
            *self._scratch,
            ids,
            values,
        )
        if top:
            order = np.lexsort((ids[:, 1:], -values[:, 1:]))
            ids[:, 1:] = np.take_along_axis(ids[:, 1:], order, 1)
            values[:, 1:] = np.take_along_axis(values[:, 1:], order, 1)
        return ids, values
