"""Draws tokens on a GPU with torch operations, because copying rows of logits to the host is slow.

The filters (top-k, top-p, min-p) and the random numbers are those of `token_choice.py` on the host.
Sums are in float64, so that a token differs from the host's token only where rounding decides.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms

DRAW_ROWS = 16
"""Maximum number of rows whose distributions are in memory."""


def draw_bytes(vocab_size: int) -> int:
    """Return an upper bound of the memory of distributions: weights, sums, sorted logits, ids."""
    return DRAW_ROWS * vocab_size * 8 * torch.float64.itemsize


def draw_on_device(
    logits: torch.Tensor,
    rows: Sequence[int],
    terms: Sequence[DrawTerms],
    numbers: npt.NDArray[np.float64],
) -> list[int]:
    """Draw a token for each of `rows` of `logits` [any, vocab].

    `terms[i]` and the random number `numbers[i]` in [0, 1) apply to `rows[i]`; rows with
    temperature 0 take their best token. See `draw_tokens` for the host.
    """
    tokens = logits.argmax(-1)
    drawn = [place for place, row_terms in enumerate(terms) if row_terms.temperature]
    # Rows without top-k and top-p need no sort, so draw the two kinds of rows separately.
    for cuts in (False, True):
        places = [place for place in drawn if _cuts(terms[place], logits.shape[1]) is cuts]
        for first in range(0, len(places), DRAW_ROWS):
            part = places[first : first + DRAW_ROWS]
            table = np.array([(*terms[place], numbers[place]) for place in part])
            columns = torch.from_numpy(table).to(logits.device).T[:, :, None]
            index = torch.tensor([rows[place] for place in part], device=logits.device)
            choose = _draw_by_rank if cuts else _draw_by_id
            chosen = choose(logits[index].double(), *columns)
            # A row without a finite maximum has no distribution: take the best token.
            finite = logits[index].amax(-1).isfinite()
            tokens[index] = torch.where(finite, chosen, tokens[index])
    token_of: list[int] = tokens.tolist()
    return [token_of[row] for row in rows]


def _cuts(terms: DrawTerms, vocab_size: int) -> bool:
    """Whether top-k or top-p restricts the candidates."""
    return 0 < terms.top_k < vocab_size or terms.top_p < 1


def _draw_by_id(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    _top_k: torch.Tensor,
    _top_p: torch.Tensor,
    min_p: torch.Tensor,
    number: torch.Tensor,
) -> torch.Tensor:
    """Draw by cumulative weights in order of ids; all arguments but the logits are [rows, 1]."""
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    weights = scaled.exp() * (scaled >= min_p.log())
    return _select(weights, number)


def _draw_by_rank(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    number: torch.Tensor,
) -> torch.Tensor:
    """Draw by cumulative weights, best token first; arguments as for `_draw_by_id`."""
    # A stable sort keeps the lower of two ids with equal logits first, as on the host.
    ordered, ids = logits.sort(stable=True, dim=-1, descending=True)
    scaled = (ordered - ordered[:, :1]) / temperature
    weights = scaled.exp()
    place = torch.arange(weights.shape[1], device=weights.device)
    weights *= (place < top_k) | (top_k <= 0)
    sums = weights.cumsum(-1)
    # Top-p keeps the best tokens until their probabilities reach it: a token stays if the sum
    # before it is less.
    weights *= (sums - weights < top_p * sums[:, -1:]) | (top_p >= 1)
    weights *= scaled >= min_p.log()
    return ids.gather(1, _select(weights, number)[:, None])[:, 0]


def _select(weights: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Return the first index whose cumulative weight exceeds `number` times the total: [rows]."""
    sums = weights.cumsum(-1)
    place = torch.searchsorted(sums, number * sums[:, -1:], right=True)[:, 0]
    # Rounding may place the result after the last token with a positive weight.
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())[:, 0]
    # NaN sums yield an index out of range; clamp it, since the caller discards such rows.
    return torch.minimum(place, last).clamp(max=weights.shape[1] - 1)
