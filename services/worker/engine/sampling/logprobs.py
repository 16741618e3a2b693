"""How likely tokens were: natural logarithms of the softmax of raw logits."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.core.logprobs import LogprobRows
from services.worker.engine.model.cpu_kernels.token_scores import TokenScorer


def logprob_rows(
    scorer: TokenScorer,
    logits: npt.NDArray[np.floating],
    rows: Sequence[int],
    token_ids: Sequence[int],
    top: int,
) -> LogprobRows:
    """How likely `token_ids[i]` was after row `rows[i]` of `logits` [any, vocab].

    Among the `top` (at most the vocabulary), the lower of two equally likely ids comes first.
    """
    ids, values = scorer(logits, rows, token_ids, top)
    return LogprobRows(top, ids.astype("<i4").tobytes(), values.astype("<f4").tobytes())
