"""How likely tokens were: natural logarithms of the softmax of raw logits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from services.core.logprobs import LogprobRows, joined

ROWS_AT_ONCE = 2
"""Rows of logits that are copied in one step; the staging memory has room for no more."""


def logprob_rows(
    logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int], top: int
) -> LogprobRows:
    """How likely `token_ids[i]` was after row `rows[i]` of `logits` [any, vocab].

    Computed in float32, or in float64 if the logits are. Among the `top` (at most the vocabulary),
    the lower of two equally likely ids comes first.
    """
    parts = [LogprobRows(top)]
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = slice(first, first + ROWS_AT_ONCE)
        parts.append(_rows(logits[list(rows[part])], token_ids[part], top))
    return joined(parts)


def _rows(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> LogprobRows:
    if logits.dtype.itemsize < torch.float32.itemsize:
        logits = logits.float()
    count = len(token_ids)
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    own = logits.gather(1, wanted)
    ids = np.empty((count, 1 + top), "<i4")
    values = np.empty((count, 1 + top), np.float64)
    ids[:, 0] = 1 + (logits > own).sum(1).cpu().numpy()
    values[:, 0] = own[:, 0].double().cpu().numpy()
    if top:
        ids[:, 1:], values[:, 1:] = _best(logits, top)
    values -= torch.logsumexp(logits, 1).double().cpu().numpy()[:, None]
    return LogprobRows(top, ids.tobytes(), values.astype("<f4").tobytes())


def _best(logits: torch.Tensor, top: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ids and logits of the `top` best of each row, best first, ties by id."""
    found = torch.topk(logits, top)
    ids, values = found.indices.cpu().numpy(), found.values.double().cpu().numpy()
    least = found.values[:, -1:]
    # torch.topk may have taken any of equal logits at the edge.
    tied = ((logits >= least).sum(1) > top).nonzero().flatten().tolist()
    for row in tied:
        candidates = (logits[row] >= least[row]).nonzero().flatten()
        kept = logits[row][candidates].double().cpu().numpy()
        order = np.argsort(-kept, kind="stable")[:top]
        ids[row], values[row] = candidates.cpu().numpy()[order], kept[order]
    order = np.lexsort((ids, -values))
    return np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
