"""Random rows of logits and requests with every sampling option, from a seed."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from services.core.planner.batch import SampleTerms
from services.core.request import Grammar, GrammarKind, Sampling

TAIL_STD, LIKELY, LIKELY_LOGIT = 2.0, 30, 14.0


class Rows(NamedTuple):
    """Rows of logits, and the request of each with the index of its next output token."""

    logits: torch.Tensor
    terms: list[SampleTerms]
    indices: list[int]


def random_rows(
    rng: np.random.Generator, count: int, vocab_size: int, grammars: tuple[str, ...] = ()
) -> Rows:
    """Rows with every option of a request, each with some probability.

    Logits have ties, masked tokens, overflows and NaN. `grammars`: regular expressions.
    """
    logits = np.stack([_random_logits(rng, vocab_size) for _ in range(count)])
    terms = [_random_terms(rng, vocab_size, grammars) for _ in range(count)]
    return Rows(torch.from_numpy(logits), terms, [len(each.output_ids) for each in terms])


def language_logits(rng: np.random.Generator, count: int, vocab_size: int) -> torch.Tensor:
    """Rows as of a language model: a few likely tokens, which have almost all of the probability.

    bfloat16 [count, vocab_size].
    """
    rows = rng.normal(0, TAIL_STD, (count, vocab_size)).astype(np.float32)
    for row in rows:
        likely = rng.choice(vocab_size, LIKELY, replace=False)
        row[likely] = LIKELY_LOGIT + rng.exponential(1.5, LIKELY)
    return torch.from_numpy(rows).to(torch.bfloat16)


def _random_logits(rng: np.random.Generator, vocab_size: int) -> npt.NDArray[np.float32]:
    row = rng.standard_normal(vocab_size, np.float32)
    row *= np.float32(rng.choice([0.01, 1.0, 3.0, 8.0]))
    if rng.random() < 0.5:
        row = row.round(int(rng.integers(0, 3)))  # with ties
    kind = rng.random()
    if kind < 0.15:
        row[rng.random(vocab_size) < rng.choice([0.1, 0.9, 1.0])] = -np.inf
    elif kind < 0.18:
        row[:] = rng.choice([0.0, -np.inf, np.nan])
    elif kind < 0.2:
        row[rng.integers(vocab_size, size=3)] = rng.choice([np.inf, np.nan])
    return row


def _random_terms(
    rng: np.random.Generator, vocab_size: int, grammars: tuple[str, ...]
) -> SampleTerms:
    def maybe(share: float) -> bool:
        return bool(rng.random() < share)

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(rng.integers(vocab_size, size=int(rng.integers(0, most + 1))).tolist())

    def number(*choices: float) -> float:
        return float(rng.choice(choices))

    prompt, output = tokens(40), tokens(30)
    grammar = None
    if grammars and maybe(0.15):
        grammar = Grammar(GrammarKind.REGEX, str(rng.choice(grammars)))
        # Most grammars begin here; others have an output that they do not allow.
        output = () if maybe(0.9) else output
    bad_words = [tokens(1) or (3,) for _ in range(3)] + [(*output[-1:], *tokens(1)) or (4,)]
    biases = tuple((token, number(-100, -0.3, 5, 100)) for token in tokens(8))
    penalized = maybe(0.5)
    sampling = Sampling(
        temperature=number(0, 1e-4, 0.2, 0.7, 1, 3),
        top_p=number(1, 1e-6, 0.3, 0.8, 0.95, 0.999),
        top_k=int(rng.choice([0, 0, 1, 5, 20, 100, vocab_size - 1, vocab_size, vocab_size + 9])),
        seed=int(rng.integers(2**31)),
        min_p=number(0, 0, 0.05, 0.5, 1),
        presence_penalty=number(0, 0.6, -2) if penalized else 0.0,
        frequency_penalty=number(0, 0.1, 2) if penalized else 0.0,
        repetition_penalty=number(1, 1.05, 0.5, 2) if penalized else 1.0,
        logit_bias=biases if maybe(0.3) else (),
        bad_words=tuple(bad_words) if maybe(0.2) else (),
        allowed_token_ids=tokens(50) if maybe(0.15) else (),
        grammar=grammar,
    )
    return SampleTerms(
        sampling,
        prompt,
        output,
        frozenset(tokens(3)),
        min_tokens=int(rng.choice([0, 0, 40])),
        top_logprobs=int(rng.choice([0, 1, 5, 20])) if maybe(0.2) else None,
    )
