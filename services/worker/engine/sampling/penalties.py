"""Penalties for tokens that occur in the prompt or the output, for all rows of a batch at once.

The repetition penalty follows CTRL §4.1 and `RepetitionPenaltyLogitsProcessor` of `transformers`:
positive logits are divided by it, others are multiplied. Presence and frequency penalty come after
it, by OpenAI's formula: logit − count · frequency − [count > 0] · presence. Only the output counts.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from services.core.request import Sampling

ROOM_MIN = 64


class TokenCounts:
    """How often each token that can be penalised occurs in a request's output.

    Tokens that occur only in the prompt count 0. They are kept for the repetition penalty, and left
    out without one. The arrays grow by doubling, so that adding a token takes constant time.
    """

    def __init__(self, sampling: Sampling, prompt_ids: Sequence[int]) -> None:
        self.sampling = sampling
        marked = sorted(set(prompt_ids)) if sampling.repetition_penalty != 1 else []
        self._places = {token_id: place for place, token_id in enumerate(marked)}
        self._ids = np.array(marked, np.int64)
        self._counts = np.zeros(len(marked), np.float64)

    def add(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the output."""
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                room = max(ROOM_MIN, place)
                self._ids = np.pad(self._ids, (0, room))
                self._counts = np.pad(self._counts, (0, room))
            self._ids[place] = token_id
            self._counts[place] += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Each token once."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """How often each of `ids` occurs in the output."""
        return self._counts[: len(self._places)]


def penalise(
    logits: npt.NDArray[np.floating], rows: Sequence[int], counted: Sequence[TokenCounts]
) -> None:
    """Lower row `rows[i]` of `logits` [rows, vocab] by the penalties of `counted[i]`."""
    sizes = [len(one.ids) for one in counted]
    if not any(sizes):
        return

    def spread(values: Iterable[float]) -> npt.NDArray[np.floating]:
        return np.repeat(np.array(list(values), logits.dtype), sizes)

    counts = np.concatenate([one.counts for one in counted]).astype(logits.dtype)
    places = (
        np.repeat(np.array(rows, np.int64), sizes),
        np.concatenate([one.ids for one in counted]),
    )
    values = logits[places]
    repetition = spread(one.sampling.repetition_penalty for one in counted)
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= spread(one.sampling.frequency_penalty for one in counted) * counts
    values -= spread(one.sampling.presence_penalty for one in counted) * (counts > 0)
    logits[places] = values
