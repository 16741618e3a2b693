"""A sampler for rows of logits, without a model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.core.planner.batch import SampleSpec, SampleTerms
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler

NO_FOLDER = Path("no model")


def uniform(seed: int, index: int) -> float:
    """The random number of output `index` under `seed`, by numpy's own generator."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=index)
    return float(np.random.Generator(generator).random())


def choose(
    logits: torch.Tensor,
    terms: Sequence[SampleTerms],
    indices: Sequence[int] | None = None,
    model_dir: Path = NO_FOLDER,
) -> Sampled:
    """What a new sampler makes of `logits` [rows, vocab]; row i is request `str(i)`.

    `indices`: the output index of each row; that which comes next if none are given.
    """
    sampler = Sampler(logits.shape[-1], Grammars(model_dir, logits.shape[-1]), logits.dtype)
    if indices is None:
        indices = [len(one.output_ids) for one in terms]
    specs = [
        (str(row), SampleSpec(one, index))
        for row, (one, index) in enumerate(zip(terms, indices, strict=True))
    ]
    made = Sampled()
    sampler.sample(logits.clone(), specs, made)
    return made


def tokens_of(
    logits: torch.Tensor, terms: Sequence[SampleTerms], indices: Sequence[int] | None = None
) -> list[int]:
    """The tokens alone, in the order of the rows; none of them fails."""
    made = choose(logits, terms, indices)
    return [made.tokens[str(row)] for row in range(len(terms))]
