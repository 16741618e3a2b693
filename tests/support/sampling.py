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
    """The random number of output `index` under `seed`, by numpy's generator."""
    digest = hashlib.blake2b(str(seed).encode(), digest_size=16).digest()
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=index)
    return float(np.random.Generator(generator).random())


def choose(
    logits: torch.Tensor,
    terms: Sequence[SampleTerms],
    indices: Sequence[int] | None = None,
    model_dir: Path = NO_FOLDER,
) -> Sampled:
    """Sample from `logits` [rows, vocab] by a new sampler; row i is request `str(i)`.

    `indices`: the output index of each row, by default the next.
    """
    sampler = Sampler(logits.shape[-1], Grammars(model_dir, logits.shape[-1]), logits.dtype)
    if indices is None:
        indices = [len(term.output_ids) for term in terms]
    specs = [
        (str(row), SampleSpec(term, index))
        for row, (term, index) in enumerate(zip(terms, indices, strict=True))
    ]
    made = Sampled()
    sampler.sample(logits.clone(), specs, made)
    return made


def tokens_of(
    logits: torch.Tensor, terms: Sequence[SampleTerms], indices: Sequence[int] | None = None
) -> list[int]:
    """The sampled tokens in row order; no row may fail."""
    made = choose(logits, terms, indices)
    return [made.tokens[str(row)] for row in range(len(terms))]
