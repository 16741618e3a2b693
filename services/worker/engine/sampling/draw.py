"""Draws a token from one row of logits: temperature, then top-k, top-p and min-p, then the draw.

The random draw of output `i` comes from a counter-based generator (Philox), keyed by the request's
seed, at counter `i`. It depends neither on the batch nor on earlier iterations: a preempted or
moved request gets the same tokens as without the interruption.
"""

import hashlib
import math

import numpy as np
import torch

from services.core.request import Sampling

CANDIDATES = 256
CANDIDATES_GROWTH = 16
"""Most nuclei lie within the `CANDIDATES` best tokens; for a larger one, more are sorted."""
SPAN = 256
"""Weights that are summed in one step when a distribution is inverted."""


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output `index` under `seed` (any integer)."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=index)
    return float(np.random.Generator(generator).random())


def draw_token(logits: torch.Tensor, sampling: Sampling, draw: float) -> int:
    """Invert the cumulative distribution of one row, filtered and ordered, at `draw`.

    The best logit is finite; tokens that cannot be chosen have minus infinity.
    """
    scaled = (logits - logits.max()).div_(sampling.temperature)
    if not 0 < sampling.top_k < len(scaled) and sampling.top_p >= 1:
        if sampling.min_p > 0:
            scaled.masked_fill_(scaled < math.log(sampling.min_p), -torch.inf)
        return _invert(scaled.exp_().cpu().numpy(), draw)
    ids, values = _filtered(scaled, sampling)
    return int(ids[_invert(np.exp(values), draw)])


def _filtered(scaled: torch.Tensor, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and scaled logits that pass top-k, then top-p, then min-p, best first.

    Top-p keeps the shortest best-first prefix whose mass reaches `top_p` of the mass that top-k
    left. Min-p keeps tokens that are at least `min_p` times as likely as the best one.
    """
    vocab = len(scaled)
    if 0 < sampling.top_k < vocab:
        ids, values = _best(scaled, sampling.top_k)
        total = float(np.exp(values).sum())
    else:
        count = min(CANDIDATES, vocab)
        ids, values = _best(scaled, count)
        total = float(torch.exp(scaled).sum(dtype=torch.float64))
        while np.exp(values).sum() < sampling.top_p * total and count == len(ids) < vocab:
            count = min(CANDIDATES_GROWTH * count, vocab)
            ids, values = _best(scaled, count)
    kept = len(ids)
    if sampling.top_p < 1:
        mass = np.cumsum(np.exp(values))
        kept = int(np.searchsorted(mass, sampling.top_p * total)) + 1
    if sampling.min_p > 0:
        kept = min(kept, int(np.searchsorted(-values, -math.log(sampling.min_p), side="right")))
    return ids[:kept], values[:kept]


def _best(scaled: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best ids and values, or all that can be chosen; ties go to the lower id."""
    # Sorting all is faster than selecting nearly all.
    threshold = torch.topk(scaled, count).values[-1] if count < len(scaled) else -torch.inf
    choosable = scaled >= threshold if threshold > -torch.inf else scaled > -torch.inf
    ids = torch.nonzero(choosable).squeeze(1)
    values = scaled[ids].double().cpu().numpy()
    order = np.argsort(-values, kind="stable")[:count]
    return ids.cpu().numpy()[order], values[order]


def _invert(weights: np.ndarray, draw: float) -> int:
    """The first position at which the cumulative weight exceeds `draw` of the total.

    Sums, in float64, of spans first, then within one span: a tenth of the time of one long sum.
    """
    starts = np.arange(0, len(weights), SPAN)
    spans = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    target = draw * spans[-1]
    span = int(np.searchsorted(spans[:-1], target, side="right"))
    before = spans[span - 1] if span else 0.0
    end = min(int(starts[span]) + SPAN, len(weights))
    within = np.cumsum(weights[starts[span] : end], dtype=np.float64)
    position = int(starts[span]) + int(np.searchsorted(within, target - before, side="right"))
    if position == end or weights[position] == 0:
        # Rounding has put the target just beyond the last token of the span that has any weight.
        position = int(np.flatnonzero(weights[:end])[-1])
    return position
