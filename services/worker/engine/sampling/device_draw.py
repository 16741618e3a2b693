"""Draws tokens where the logits lie, by torch's operations: for GPUs, whose rows are large to copy.

The rules are those of `draw.py`, and so is the number that says which part of a distribution is
drawn. Sums are in float64, so a token differs from the host's only where rounding decides.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms

DRAW_ROWS = 16
"""Rows whose distributions exist at a time."""


def draw_bytes(vocab_size: int) -> int:
    """The most memory of distributions: weights, sums, and sorted ones with their ids."""
    return DRAW_ROWS * vocab_size * 8 * torch.float64.itemsize


def draw_on_device(
    logits: torch.Tensor,
    rows: Sequence[int],
    terms: Sequence[DrawTerms],
    numbers: npt.NDArray[np.float64],
) -> list[int]:
    """A token of each of `rows` of `logits` [any, vocab]; see `draw_tokens`."""
    tokens = logits.argmax(-1)
    drawn = [place for place, one in enumerate(terms) if one.temperature]
    for cuts in (False, True):
        places = [place for place in drawn if _cuts(terms[place], logits.shape[1]) is cuts]
        for first in range(0, len(places), DRAW_ROWS):
            part = places[first : first + DRAW_ROWS]
            table = np.array([(*terms[place], numbers[place]) for place in part])
            columns = torch.from_numpy(table).to(logits.device).T[:, :, None]
            index = torch.tensor([rows[place] for place in part], device=logits.device)
            choose = _choose_best if cuts else _choose_any
            chosen = choose(logits[index].double(), *columns)
            # A row without a finite best logit is taken greedily.
            finite = logits[index].amax(-1).isfinite()
            tokens[index] = torch.where(finite, chosen, tokens[index])
    chosen_of: list[int] = tokens.tolist()
    return [chosen_of[row] for row in rows]


def _cuts(terms: DrawTerms, vocab_size: int) -> bool:
    """Whether only the best tokens are drawn from."""
    return 0 < terms.top_k < vocab_size or terms.top_p < 1


def _choose_any(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    _top_k: torch.Tensor,
    _top_p: torch.Tensor,
    min_p: torch.Tensor,
    number: torch.Tensor,
) -> torch.Tensor:
    """In the order of ids. Every argument but the logits is [rows, 1]."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    weights = scaled.exp() * (scaled >= min_p.log())
    return _drawn(weights, number)


def _choose_best(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    number: torch.Tensor,
) -> torch.Tensor:
    """In the order of logits, best first. Every argument but the logits is [rows, 1]."""
    ordered, ids = logits.sort(stable=True, dim=-1, descending=True)
    scaled = (ordered - ordered[:, :1]) / temperature
    weights = scaled.exp()
    place = torch.arange(weights.shape[1], device=weights.device)
    weights *= (place < top_k) | (top_k <= 0)
    sums = weights.cumsum(-1)
    # The shortest prefix that reaches the mass: all before a token have less.
    weights *= (sums - weights < top_p * sums[:, -1:]) | (top_p >= 1)
    weights *= scaled >= min_p.log()
    return ids.gather(1, _drawn(weights, number)[:, None])[:, 0]


def _drawn(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The first place whose cumulative weight exceeds `number` of the total: [rows]."""
    sums = weights.cumsum(-1)
    place = torch.searchsorted(sums, number * sums[:, -1:], right=True)[:, 0]
    # Rounding may put the target beyond the last place that has any weight.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())[:, 0]
    return torch.minimum(place, last).clamp(max=weights.shape[1] - 1)  # where sums are NaN
