"""The sampler's state of a sequence, and the random numbers that choose its tokens."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from services.core.planner.batch import SampleTerms
from services.core.request import Sampling
from services.worker.engine.model.cpu_kernels.philox import uniform_numbers
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms
from services.worker.engine.sampling.grammar import Unusable
from services.worker.engine.sampling.rules import SamplingRules

GREEDY_BELOW = 1e-5
"""Lower temperatures sample greedily, because dividing by them would overflow float32."""
_WORD_BYTES = 8


class RequestDraws:
    """The parameters of the random choice for a sequence, and the Philox key from its seed."""

    __slots__ = ("key", "terms")

    def __init__(self, sampling: Sampling) -> None:
        temperature = sampling.temperature if sampling.temperature >= GREEDY_BELOW else 0.0
        self.terms = DrawTerms(temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        # Hash the seed, so that similar seeds have unrelated keys.
        digest = hashlib.blake2b(str(sampling.seed).encode(), digest_size=2 * _WORD_BYTES).digest()
        self.key = tuple(
            int.from_bytes(digest[first : first + _WORD_BYTES], "little")
            for first in (0, _WORD_BYTES)
        )


def draw_numbers(wanted: Sequence[tuple[RequestDraws, int]]) -> npt.NDArray[np.float64]:
    """Return, for each output token, the uniform random number in [0, 1) that selects it."""
    if not any(draws.terms.temperature for draws, _ in wanted):
        return np.zeros(len(wanted))
    keys = np.array([draws.key for draws, _ in wanted], np.uint64)
    return uniform_numbers(keys, np.array([index for _, index in wanted], np.uint64))


@dataclass(frozen=True, slots=True)
class RequestState:
    """The sampler's state of a sequence. `refused`: why its grammar cannot be used."""

    terms: SampleTerms
    draws: RequestDraws
    rules: SamplingRules | None
    refused: Unusable | None = None

    def modifies_logits(self, index: int) -> bool:
        """Whether steps 1 and 2 apply to output token `index`."""
        if self.rules is not None or self.refused is not None:
            return True
        return index < self.terms.min_tokens and bool(self.terms.stop_ids)


class SampleRow(NamedTuple):
    """A row of logits for output token `index` of a sequence."""

    seq_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which is not used
    state: RequestState
