"""Chooses tokens: a function of (logits, sampling, seed, output index) and nothing else.

The random draw of output `i` comes from a counter-based generator keyed by the request's seed at
counter `i`, so it depends neither on the batch nor on what ran before: a preempted, moved or
resumed request goes on exactly as it would have.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch

from services.core.iteration.batch import SampleSpec
from services.core.request import Sampling

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave the range of float32."""
CANDIDATES = 256
CANDIDATES_GROWTH = 16
"""Most nuclei are among the `CANDIDATES` best tokens; for one that is not, more are sorted."""
SPAN = 256
"""Weights that are summed at a time when a distribution is inverted."""


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    """One token per row of `logits` [rows, vocab], which is overwritten at banned tokens.

    `specs[i]` belongs to row i. Among equal logits the lower token id comes first. A row that is
    not finite, from a model that overflows, is taken greedily.
    """
    for row, spec in enumerate(specs):
        if spec.banned_ids:
            logits[row, list(spec.banned_ids)] = -torch.inf
    peaks = torch.max(logits, dim=-1)
    best: list[float] = peaks.values.tolist()
    tokens: list[int] = peaks.indices.tolist()
    for row, spec in enumerate(specs):
        if spec.sampling.temperature >= GREEDY_BELOW and math.isfinite(best[row]):
            draw = uniform(spec.sampling.seed, spec.index)
            tokens[row] = _draw_token(logits[row], spec.sampling, draw)
    return tokens


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of output `index` under `seed` (any integer)."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=index)
    return float(np.random.Generator(generator).random())


def _draw_token(logits: torch.Tensor, sampling: Sampling, draw: float) -> int:
    """Invert the cumulative distribution of one row, filtered and ordered, at `draw`."""
    scaled = (logits - logits.max()).div_(sampling.temperature)
    if not 0 < sampling.top_k < len(scaled) and sampling.top_p >= 1:
        return _invert(scaled.exp_().cpu().numpy(), draw)
    ids, values = _filtered(scaled, sampling)
    return int(ids[_invert(np.exp(values), draw)])


def _filtered(scaled: torch.Tensor, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and scaled logits that pass top-k, then top-p, best first.

    Top-p keeps the shortest best-first prefix whose mass, among those that top-k left, reaches it.
    """
    vocab = len(scaled)
    if 0 < sampling.top_k < vocab:
        ids, values = _best(scaled, sampling.top_k)
        total = float(np.exp(values).sum())
    else:
        ids, values = _best(scaled, min(CANDIDATES, vocab))
        total = float(torch.exp(scaled).sum(dtype=torch.float64))
        while np.exp(values).sum() < sampling.top_p * total and len(ids) < vocab:
            ids, values = _best(scaled, min(CANDIDATES_GROWTH * len(ids), vocab))
    if sampling.top_p >= 1:
        return ids, values
    mass = np.cumsum(np.exp(values))
    kept = int(np.searchsorted(mass, sampling.top_p * total)) + 1
    return ids[:kept], values[:kept]


def _best(scaled: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best ids and values; ties go to the lower id."""
    # Sorting all is quicker than selecting nearly all.
    threshold = torch.topk(scaled, count).values[-1] if count < len(scaled) else -torch.inf
    ids = torch.nonzero(scaled >= threshold).squeeze(1)
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
