"""Counts tokens that differ from a reference by rounding; fails on any other difference."""

from pathlib import Path

import torch
import transformers

from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import Sampling
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler
from tests.support.sampling import NO_FOLDER, uniform

EXCUSED_GAP = 1e-4


@torch.inference_mode()
def count_excused(
    reference: transformers.PreTrainedModel,
    prompt: list[int],
    output: list[int],
    sampling: Sampling,
    stop_ids: frozenset[int] = frozenset(),
    model_dir: Path = NO_FOLDER,
) -> int:
    """Number of tokens of `output` that differ from the reference after the same prefix.

    Raises AssertionError for a difference that `EXCUSED_GAP` in the logits does not explain.
    `sampling`
    is greedy or has no filters but rules. A grammar needs the model's folder.
    """
    logits = reference(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()
    grammars, excused = Grammars(model_dir, logits.shape[-1]), 0
    sampler = Sampler(logits.shape[-1], grammars, logits.dtype)
    for index, token in enumerate(output):
        row, made = logits[index : index + 1].clone(), Sampled()
        terms = SampleTerms(sampling, tuple(prompt), tuple(output[:index]), stop_ids)
        sampler.sample(row, [("r", SampleSpec(terms, index))], made)
        if token == made.tokens["r"]:
            continue
        gap = _gap(row[0], token, sampling, index)
        assert gap < EXCUSED_GAP, f"token {index} differs, gap {gap}"
        excused += 1
    return excused


def _gap(row: torch.Tensor, token: int, sampling: Sampling, index: int) -> float:
    """How far logits (greedy) or cumulated probability (sampled) are from choosing `token`.

    `row`: logits after the rules.
    """
    if sampling.temperature == 0:
        return float(row.max() - row[token])
    assert sampling.top_p == 1 and sampling.top_k == 0 and sampling.min_p == 0
    cumulated = torch.softmax(row.double() / sampling.temperature, -1).cumsum(-1)
    draw = uniform(sampling.seed, index)
    below = float(cumulated[token - 1]) if token else 0.0
    return max(below - draw, draw - float(cumulated[token]))
