import math
from collections import Counter

import pytest
import torch

from services.core.planner.batch import SampleTerms
from services.core.request import Sampling
from tests.support.sampling import tokens_of

GREEDY = SampleTerms(Sampling(temperature=0.0))


def oracle_distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Probabilities after temperature, top-k, top-p and min-p, by definition."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = [math.exp((logits[t] - max(logits)) / sampling.temperature) for t in order]
    probabilities = [weight / sum(weights) for weight in weights]
    kept, mass = [], 0.0
    for token, probability in zip(order, probabilities, strict=True):
        kept.append((token, probability))
        mass += probability
        if mass >= sampling.top_p:
            break
    kept = [(token, weight) for token, weight in kept if weight >= sampling.min_p * kept[0][1]]
    mass = sum(probability for _, probability in kept)
    return {token: probability / mass for token, probability in kept}


def draws(logits: torch.Tensor, sampling: Sampling, count: int) -> list[int]:
    terms = [SampleTerms(sampling)] * count
    return tokens_of(logits.expand(count, -1), terms, range(count))


def test_greedy_takes_the_best_token_and_the_lower_id_of_ties() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 1.0, 1.0]])
    assert tokens_of(logits, [GREEDY] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_tokens_are_not_chosen_before_min_tokens(temperature: float) -> None:
    logits = torch.tensor([[9.0, 8.0, 7.0, 0.0]])
    sampling = Sampling(temperature=temperature)
    terms = SampleTerms(sampling, stop_ids=frozenset({0, 1}), min_tokens=50)
    for index in range(50):
        assert tokens_of(logits, [terms], [index])[0] in {2, 3}
    assert {tokens_of(logits, [terms], [index])[0] for index in range(50, 80)} & {0, 1}


def test_a_row_does_not_depend_on_its_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 1000, generator=generator)
    terms = [
        SampleTerms(Sampling(temperature=0.5 * (row % 3), top_k=row % 5 * 10, seed=row))
        for row in range(16)
    ]
    together = tokens_of(logits, terms, range(16))
    alone = [tokens_of(logits[row : row + 1], [terms[row]], [row])[0] for row in range(16)]
    assert together == alone


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_k=5),
        Sampling(temperature=1.5, top_p=0.6),
        Sampling(temperature=1.0, top_k=12, top_p=0.8),
        Sampling(temperature=1.0, top_p=0.05),
        Sampling(temperature=1.0, min_p=0.1),
        Sampling(temperature=1.5, min_p=1.0),
        Sampling(temperature=1.5, top_k=20, min_p=0.05),
        Sampling(temperature=1.5, top_k=20, top_p=0.95, min_p=0.2),
    ],
)
def test_frequencies_match_the_definition(sampling: Sampling) -> None:
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(1))
    expected = oracle_distribution(logits.double().tolist(), sampling)
    count = 4000
    counts = Counter(draws(logits, sampling, count))
    assert set(counts) <= set(expected)
    for token, probability in expected.items():
        deviation = math.sqrt(count * probability * (1 - probability))
        assert abs(counts[token] - count * probability) <= 5 * deviation + 1


@pytest.mark.parametrize("spread", [0.01, 3.0])
def test_wide_nuclei_of_a_large_vocabulary_are_sampled(spread: float) -> None:
    """The nucleus may exceed the first window of candidates."""
    logits = spread * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    for sampling in (
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=1.0, top_k=1000, top_p=0.95),
        Sampling(temperature=1.0, top_k=400),
    ):
        allowed = oracle_distribution(logits.double().tolist(), sampling)
        tokens = draws(logits, sampling, 300)
        assert set(tokens) <= set(allowed)
        assert len(set(tokens)) > 20


def test_equal_logits_at_the_edge_of_top_k_go_to_lower_ids() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0])
    assert set(draws(logits, Sampling(temperature=1.0, top_k=3), 300)) == {0, 1, 2}


def test_top_k_of_1_is_greedy() -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(3))
    assert set(draws(logits, Sampling(temperature=2.0, top_k=1), 20)) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [5e-324, 1e-50, 1e-46, 1e-30, 1e-6, 1e-5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 5), (1e-300, 5)])
def test_a_temperature_near_zero_is_greedy(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    terms = [SampleTerms(Sampling(temperature, top_p, top_k, seed=1))] * 3
    assert tokens_of(logits, terms, range(3)) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 5)])
def test_non_finite_logits_yield_a_token(value: float, top_p: float, top_k: int) -> None:
    terms = [SampleTerms(Sampling(0.7, top_p, top_k, seed=1))]
    (token,) = tokens_of(torch.full((1, 300), value), terms)
    assert 0 <= token < 300
