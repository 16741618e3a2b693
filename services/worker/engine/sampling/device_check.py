"""Compares the tokens of a device sampler with the host's, before an engine uses it.

The kernels are tested in Triton's interpreter; a driver or compiler of this machine may still break
them, and wrong tokens would go unnoticed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import Sampling
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampled, Sampler

if TYPE_CHECKING:
    # It imports Triton, which CPU builds of torch may lack.
    from services.worker.engine.sampling.device_sampler import DeviceSampler

DIFFERENT_MAX = 0.05
"""Share of rows whose tokens may differ by rounding."""
ROWS_PER_CASE = 6
DEVIATION = 3.0
"""Of the logits: a few dozen tokens have most of the probability."""
KNOWN_TOKENS = 40
"""Tokens in the prompt and the rules."""
_KNOWN = tuple(range(KNOWN_TOKENS))
CASES = (
    SampleTerms(Sampling(temperature=0.0)),
    SampleTerms(Sampling()),
    SampleTerms(Sampling(top_p=0.8)),
    SampleTerms(Sampling(top_k=20, min_p=0.05), top_logprobs=5),
    SampleTerms(
        Sampling(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05), prompt_ids=_KNOWN
    ),
    SampleTerms(
        Sampling(presence_penalty=0.5, frequency_penalty=0.5, bad_words=((1,), (2, 3))),
        prompt_ids=_KNOWN,
        output_ids=(2, 2, 5),
    ),
    SampleTerms(Sampling(allowed_token_ids=_KNOWN, logit_bias=((4, 3.0), (7, -100.0)))),
    SampleTerms(Sampling(temperature=0.0), stop_ids=frozenset(_KNOWN), min_tokens=5),
)


def differing_share(
    device_sampler: "DeviceSampler", vocab_size: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Return the share of rows for which device and host choose different tokens.

    `dtype` is that of the logits. Random rows with penalties, filters, biases and masks.
    """
    terms = [case for case in CASES for _ in range(ROWS_PER_CASE)]
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(terms), vocab_size, generator=generator).mul_(DEVIATION).to(dtype)
    host = _sampled(logits, terms, vocab_size, None)
    there = _sampled(logits.to(device), terms, vocab_size, device_sampler)
    equal = sum(
        (host.tokens.get(name), host.failed.get(name))
        == (there.tokens.get(name), there.failed.get(name))
        for name in map(str, range(len(terms)))
    )
    return 1 - equal / len(terms)


def _sampled(
    logits: torch.Tensor,
    terms: Sequence[SampleTerms],
    vocab_size: int,
    device_sampler: "DeviceSampler | None",
) -> Sampled:
    sampler = Sampler(
        vocab_size, Grammars(Path("no model"), vocab_size), torch.float32, device_sampler
    )
    sampled = Sampled()
    # The sampler has memory for the counts of `rows_max` sequences at least.
    most = len(terms) if device_sampler is None else device_sampler.rows_max
    for first in range(0, len(terms), most):
        part = range(first, min(first + most, len(terms)))
        specs = [(str(row), SampleSpec(terms[row], len(terms[row].output_ids))) for row in part]
        # The host sampler may overwrite its rows.
        sampler.sample(logits[part.start : part.stop].clone(), specs, sampled)
        sampler.keep_only(())
    return sampled
