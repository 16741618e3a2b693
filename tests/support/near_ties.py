"""Tokens that differ from a reference where rounding alone decides: how many, and no others."""

import torch
import transformers

from services.core.iteration.batch import SampleTerms
from services.core.request import Sampling
from services.worker.engine.sampling.draw import uniform
from tests.support.sampling import tokens_of

EXCUSED_GAP = 1e-4


@torch.inference_mode()
def count_excused(
    reference: transformers.PreTrainedModel,
    prompt: list[int],
    output: list[int],
    sampling: Sampling,
) -> int:
    """How many tokens of `output` are not what the reference gives after the same prefix.

    Raises AssertionError at one that no error of `EXCUSED_GAP` in the logits explains. `sampling`
    is greedy or has no filters.
    """
    logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    excused = 0
    for index, token in enumerate(output):
        row = logits[index]
        if token == tokens_of(row[None], [SampleTerms(sampling)], [index])[0]:
            continue
        gap = _gap(row, token, sampling, index)
        assert gap < EXCUSED_GAP, f"token {index} differs, gap {gap}"
        excused += 1
    return excused


def _gap(row: torch.Tensor, token: int, sampling: Sampling, index: int) -> float:
    """How far logits (greedy) or cumulated probability (sampled) are from choosing `token`."""
    if sampling.temperature == 0:
        return float(row.max() - row[token])
    assert sampling.top_p == 1 and sampling.top_k == 0
    cumulated = torch.softmax(row.double() / sampling.temperature, -1).cumsum(-1)
    draw = uniform(sampling.seed, index)
    below = float(cumulated[token - 1]) if token else 0.0
    return max(below - draw, draw - float(cumulated[token]))
