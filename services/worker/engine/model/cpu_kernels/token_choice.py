"""Kernel that chooses a token from each row of logits: greedily, or by a random draw.

A draw takes the first token whose cumulative probability exceeds a uniform random number: in order
of ids without top-k and top-p, otherwise among the kept tokens, best first. Weighted quickselect
(`candidates.select_prefix`) replaces a sort. A token's *weight* is its probability relative to the
best token, whose logit is `peak`; *mass* is a sum of weights. `lanes` are scratch of `candidates`.
"""

from collections.abc import Sequence
from functools import cache
from math import isfinite, log
from typing import NamedTuple

import numpy as np
from numba import float64
from numba.extending import register_jitable

from services.worker.engine.model.cpu_kernels.candidates import (
    Scratch,
    best_token,
    gather,
    lane_peaks,
    lane_threshold,
    select_prefix,
)
from services.worker.engine.model.cpu_kernels.compiler import compiled
from services.worker.engine.model.cpu_kernels.kernel import Kernel
from services.worker.engine.model.cpu_kernels.token_scores import element, mass_of, weight

SPAN = 256
"""Tokens per partial sum of a cumulative distribution."""
NUCLEUS_GUESS = 64
"""Number of best tokens to gather first for top-p; most nuclei (the kept tokens) are smaller."""
_LOWEST = -3.4e38
"""Tokens with a logit at or below it are masked and never chosen."""
# Logits closer than this share of their distance from the maximum may become equal after the
# division by the temperature.
_TIE_TOLERANCE = 2.0**-20
_SIGNATURE = (
    "void({real}[:, ::1], {real}[::1], {real}[::1], float64[::1], int64[::1], float64[::1],"
    " {real}[::1], int32[::1], {real}[::1], float64[::1], int64[::1], {real}[::1])"
)


class DrawTerms(NamedTuple):
    """The sampling parameters of a random draw; `temperature` 0 is greedy. See `Sampling`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


@register_jitable
def _draw_by_id(row, peak, temperature, log_min_p, draw, masses):  # type: ignore[no-untyped-def]
    """Return the first token in order of ids whose cumulative weight exceeds `draw` × total.

    Weights with a logarithm below `log_min_p` count as 0. `masses` is scratch.
    """
    # Compute cumulative sums per span first, then scan the span that contains the target.
    size, total = len(row), 0.0
    spans = (size + SPAN - 1) // SPAN
    for span in range(spans):
        total += mass_of(row[span * SPAN : (span + 1) * SPAN], peak, temperature, log_min_p)
        masses[span] = total
    target, span = draw * total, 0
    while span < spans - 1 and masses[span] <= target:
        span += 1
    before = masses[span - 1] if span else 0.0
    chosen = -1
    for token in range(span * SPAN, min((span + 1) * SPAN, size)):
        mass = float64(weight(row[token], peak, temperature, log_min_p))
        if mass > 0:
            chosen, before = token, before + mass
            if before > target:
                return chosen
    # After rounding errors the target may exceed all sums: take the last token with a weight.
    token = span * SPAN
    while chosen < 0 and token > 0:
        token -= 1
        if weight(row[token], peak, temperature, log_min_p) > 0:
            chosen = token
    return max(chosen, 0)


@register_jitable
def _take(row, threshold, peak, temperature, ids, values, weights):  # type: ignore[no-untyped-def]
    """Gather the tokens whose logit reaches `threshold`; returns their number and mass.

    `values` receives their scaled logits, `weights` their weights.
    """
    # Include tokens that may tie with the threshold after scaling, so that ties resolve by id.
    lowest = element(_LOWEST, row)
    count = gather(
        row, max(element(threshold - (peak - threshold) * _TIE_TOLERANCE, row), lowest), ids
    )
    mass = 0.0
    for place in range(count):
        values[place] = np.true_divide(row[ids[place]] - peak, temperature)
        weights[place] = np.exp(float64(values[place]))
        mass += weights[place]
    return count, mass


@register_jitable
def _take_best(row, peak, temperature, top_k, lanes, ids, values, weights):  # type: ignore[no-untyped-def]
    """Move the `top_k` best tokens to the front; returns their number and mass."""
    threshold = lane_threshold(lanes, top_k, ids, values, weights)
    count, _ = _take(row, threshold, peak, temperature, ids, values, weights)
    # Select by rank, with unit weights; then restore the weights.
    weights[:count] = 1.0
    count = select_prefix(ids, values, weights, count, float64(top_k), False)
    mass = 0.0
    for place in range(count):
        weights[place] = np.exp(float64(values[place]))
        mass += weights[place]
    return count, mass


@register_jitable
def _take_nucleus(row, peak, temperature, top_p, lanes, ids, values, weights):  # type: ignore[no-untyped-def]
    """Gather the best tokens with at least the share `top_p` of the mass.

    Returns their number and the total mass.
    """
    total = mass_of(row, peak, temperature, element(_LOWEST, row))
    # Try a few tokens first, which usually suffice.
    threshold = lane_threshold(lanes, NUCLEUS_GUESS, ids, values, weights)
    count, mass = _take(row, threshold, peak, temperature, ids, values, weights)
    if mass < top_p * total:
        # All tokens below this threshold together have less than the mass outside the nucleus.
        share = (1.0 - top_p) * total / (2 * len(row))
        count, _ = _take(
            row, peak + temperature * log(share), peak, temperature, ids, values, weights
        )
    return count, total


@register_jitable
def _draw_by_rank(  # type: ignore[no-untyped-def]
    row, peak, temperature, log_min_p, top_p, top_k, draw, lanes, ids, values, weights
):
    """Return the first token, best first, whose cumulative weight exceeds `draw` × total.

    Only tokens that pass top-k, top-p and min-p (`log_min_p` is its logarithm) count.
    """
    if 0 < top_k < len(row):
        count, total = _take_best(row, peak, temperature, top_k, lanes, ids, values, weights)
    else:
        count, total = _take_nucleus(row, peak, temperature, top_p, lanes, ids, values, weights)
    if top_p < 1:
        count = select_prefix(ids, values, weights, count, top_p * total, False)
    # Apply min-p on the log scale.
    kept, mass = 0, 0.0
    for place in range(count):
        if values[place] >= log_min_p:
            mass += weights[place]
            ids[kept], values[kept], weights[kept] = ids[place], values[place], weights[place]
            kept += 1
    return ids[select_prefix(ids, values, weights, kept, draw * mass, True) - 1]


def _choose(  # type: ignore[no-untyped-def]
    logits, temperature, log_min_p, top_p, top_k, draws, lanes, ids, values, weights, tokens, best
):
    for m in range(len(logits)):
        row = logits[m]
        peak = lane_peaks(row, lanes)
        best[m] = peak
        # Choose greedily, too, in a row without a usable maximum (NaN, infinity, all masked).
        if temperature[m] == 0 or not isfinite(peak) or peak <= _LOWEST:
            tokens[m] = best_token(row, lanes, peak)
        elif 0 < top_k[m] < len(row) or top_p[m] < 1:
            tokens[m] = _draw_by_rank(
                row, peak, temperature[m], log_min_p[m], top_p[m], top_k[m], draws[m],
                lanes, ids, values, weights,
            )  # fmt: skip
        else:
            tokens[m] = _draw_by_id(row, peak, temperature[m], log_min_p[m], draws[m], weights)


@cache
def _kernel(real: str) -> Kernel:
    kernel = compiled(_SIGNATURE.format(real=real))(_choose)
    kernel.load()
    return kernel


# Compile for float32 at import; float64 is rare.
_kernel("float32")


class TokenChooser:
    """Chooses tokens with a shared `scratch`. Not thread-safe."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._kernel = _kernel(scratch.dtype)

    def __call__(
        self, logits: np.ndarray, terms: Sequence[DrawTerms], draws: np.ndarray
    ) -> tuple[list[int], list[float]]:
        """Choose a token for each row of `logits` [rows, vocab]; also returns the best logits.

        `draws` [rows] are uniform numbers in [0, 1). In a row that is all masked or has no finite
        best logit, the choice is greedy. Raises ValueError if the logits do not match the scratch.
        """
        self._scratch.check(logits)
        temperature, top_k, top_p, min_p = (np.array(column) for column in zip(*terms, strict=True))
        with np.errstate(divide="ignore"):
            log_min_p = np.log(min_p).astype(logits.dtype)
        tokens = np.empty(len(terms), np.int64)
        best = np.empty(len(terms), logits.dtype)
        self._kernel(
            np.ascontiguousarray(logits),
            temperature.astype(logits.dtype),
            log_min_p,
            top_p.astype(np.float64),
            top_k.astype(np.int64),
            draws,
            *self._scratch,
            tokens,
            best,
        )
        return tokens.tolist(), best.tolist()
