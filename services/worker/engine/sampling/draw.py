"""Draws tokens from rows of logits: temperature, then top-k, top-p and min-p, then the draw.

Top-p keeps the shortest best-first prefix whose mass reaches `top_p` of the mass that top-k left.
Min-p keeps tokens that are at least `min_p` times as likely as the best one.

The random draw of output `i` comes from a counter-based generator (Philox), keyed by the request's
seed, at counter `i`. It depends neither on the batch nor on earlier iterations: a preempted or
moved request gets the same tokens as without the interruption.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.core.request import Sampling
from services.worker.engine.model.cpu_kernels.philox import uniform_numbers
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms, TokenChooser

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave the range of float32."""
_WORD_BYTES = 8


class RequestDraws:
    """How the tokens of one request are drawn."""

    __slots__ = ("key", "terms")

    def __init__(self, sampling: Sampling) -> None:
        temperature = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        self.terms = DrawTerms(temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        digest = hashlib.blake2b(str(sampling.seed).encode(), digest_size=2 * _WORD_BYTES).digest()
        self.key = tuple(
            int.from_bytes(digest[first : first + _WORD_BYTES], "little")
            for first in (0, _WORD_BYTES)
        )


def draw_tokens(
    chooser: TokenChooser,
    logits: npt.NDArray[np.floating],
    wanted: Sequence[tuple[RequestDraws, int]],
) -> tuple[list[int], list[float]]:
    """A token of each row of `logits` [rows, vocab], and the best logit of each row.

    `wanted[i]`: the request of row i, and the index of the output. A request whose temperature is
    0 gets the best token, of equal ones that with the lowest id; so does one whose row has no
    finite best logit.
    """
    return chooser(logits, [draws.terms for draws, _ in wanted], draw_numbers(wanted))


def draw_numbers(wanted: Sequence[tuple[RequestDraws, int]]) -> npt.NDArray[np.float64]:
    """For each output, which part of its distribution is drawn, in [0, 1)."""
    if not any(draws.terms.temperature for draws, _ in wanted):
        return np.zeros(len(wanted))
    keys = np.array([draws.key for draws, _ in wanted], np.uint64)
    return uniform_numbers(keys, np.array([index for _, index in wanted], np.uint64))
