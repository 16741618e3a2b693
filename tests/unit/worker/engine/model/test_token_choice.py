"""The compiled choice of tokens against the definition, in float64."""

import numpy as np
import pytest

from services.worker.engine.model.cpu_kernels.candidates import LANES, Scratch
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms, TokenChooser

ROUNDING = 3e-6
"""How near to a border of its share a draw may lie for a token beside it to be right, too."""
VOCABULARIES = (1, 5, LANES - 1, LANES, 1000, 5000)


def shares(logits: np.ndarray, terms: DrawTerms) -> tuple[np.ndarray, np.ndarray]:
    """Tokens in the order of the draw with their shares, by definition."""
    scaled = logits - logits.max()
    scaled = (scaled.astype(logits.dtype) / logits.dtype.type(terms.temperature)).astype(np.float64)
    order = np.lexsort((np.arange(len(logits)), -scaled))
    order = order[scaled[order] > -np.inf]
    filtered = 0 < terms.top_k < len(logits) or terms.top_p < 1
    if 0 < terms.top_k < len(logits):
        order = order[: terms.top_k]
    weights = np.exp(scaled[order])
    if terms.top_p < 1:
        reached = np.searchsorted(np.cumsum(weights), terms.top_p * weights.sum())
        order = order[: reached + 1]
    if terms.min_p > 0:
        order = order[np.exp(scaled[order]) >= terms.min_p]
    if not filtered:
        order = np.sort(order)
    weights = np.exp(scaled[order])
    return order, weights / weights.sum()


def is_explained(token: int, logits: np.ndarray, terms: DrawTerms, draw: float) -> bool:
    """Whether `token` matches the definition, up to rounding."""
    explained = False
    for slack in (0.0, -ROUNDING, ROUNDING):
        # Rounding may also move the border of the nucleus.
        top_p = terms.top_p if terms.top_p >= 1 else min(max(terms.top_p + slack, 1e-9), 1 - 1e-12)
        order, share = shares(logits, terms._replace(top_p=top_p))
        place = np.flatnonzero(order == token)
        if len(place):
            end = share[: place[0] + 1].sum()
            explained |= end - share[place[0]] - ROUNDING <= draw <= end + ROUNDING
    return explained


def exact(logits: np.ndarray, terms: DrawTerms, draw: float) -> int:
    order, share = shares(logits, terms)
    place = np.searchsorted(np.cumsum(share), draw, side="right")
    return int(order[min(place, len(order) - 1)])


def some_terms(rng: np.random.Generator) -> DrawTerms:
    return DrawTerms(
        temperature=float(rng.choice([0.05, 0.7, 1.0, 1.3, 8.0])),
        top_k=int(rng.choice([0, 0, 1, 5, 50, 255, 256, 257, 900])),
        top_p=float(rng.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.999])),
        min_p=float(rng.choice([0.0, 0.0, 0.1, 1.0])),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_match_the_definition(vocab: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(vocab)
    choose, same, count = TokenChooser(Scratch.of(vocab, dtype)), 0, 240
    logits = rng.normal(size=(count, vocab)) * rng.choice([0.01, 1, 4, 20], size=(count, 1))
    logits[::3] = np.round(logits[::3])  # many equal ones
    logits[1::5] = np.where(rng.random((len(logits[1::5]), vocab)) < 0.3, -np.inf, logits[1::5])
    logits[:, 0] = np.maximum(logits[:, 0], -30)  # one is left
    logits = logits.astype(dtype)
    terms, draws = [some_terms(rng) for _ in range(count)], rng.random(count)
    draws[:8], draws[8:16] = 0.0, 1 - 2.0**-53
    tokens, best = choose(logits, terms, draws)
    assert best == logits.max(1).tolist()
    for row, token in enumerate(tokens):
        assert is_explained(token, logits[row], terms[row], draws[row]), (row, terms[row], token)
        same += token == exact(logits[row], terms[row], draws[row])
    assert same >= count - 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_go_to_the_first_token(dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 4, size=(50, 1000)).astype(dtype)
    logits[7] = -np.inf
    terms = [DrawTerms(0.0, top_k=5, top_p=0.5, min_p=0.1)] * 50
    tokens, _ = TokenChooser(Scratch.of(1000, dtype))(logits, terms, np.zeros(50))
    assert tokens == logits.argmax(1).tolist()


def test_nan_logits_are_never_chosen() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(90, 700)).astype(np.float32)
    logits[:, ::2] = np.nan
    terms = [
        DrawTerms(1.0, top_k, top_p, 0.0) for top_k in (0, 5, 600) for top_p in (1.0, 0.9)
    ] * 15
    tokens, best = TokenChooser(Scratch.of(700, np.float32))(logits, terms, rng.random(90))
    assert all(token % 2 for token in tokens)
    assert best == np.nanmax(logits, axis=1).tolist()


def test_logits_of_another_size_or_type_are_refused() -> None:
    choose = TokenChooser(Scratch.of(300, np.float32))
    terms, draws = [DrawTerms(1.0, 0, 1.0, 0.0)], np.zeros(1)
    for logits in (np.zeros((1, 301), np.float32), np.zeros((1, 300))):
        with pytest.raises(ValueError, match="do not match scratch for 300 tokens in float32"):
            choose(logits, terms, draws)
