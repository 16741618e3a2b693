"""Penalties, bias, bad words and allowed tokens, compared with `transformers` and the formulas."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from services.core.planner.batch import SampleSpec, SampleTerms
from services.core.request import Sampling
from services.gateway.model.sampling import bad_word_ids
from services.gateway.text.tokenizer import Tokenizer
from services.worker.engine.model.cpu_kernels.candidates import Scratch
from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms, TokenChooser
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.rules import SamplingRules
from services.worker.engine.sampling.sampler import NOTHING_LEFT, Sampled, Sampler
from services.worker.errors import InvalidBatch
from tests.support.sampling import NO_FOLDER, choose, tokens_of

VOCAB = 40
GREEDY = Sampling(temperature=0.0)


def row(seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(1, VOCAB, generator=generator, dtype=dtype)


def histories(count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    rng = random.Random(count)
    return [
        (
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))),
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, 30))),
        )
        for _ in range(count)
    ]


def changed(
    logits: torch.Tensor, sampling: Sampling, prompt: tuple[int, ...], output: tuple[int, ...]
) -> torch.Tensor:
    """The row of logits after all rules, as `RecordingSampler` sees it."""
    seen: list[torch.Tensor] = []
    sampler = Sampler(logits.shape[-1], Grammars(NO_FOLDER, logits.shape[-1]), logits.dtype)
    spec = SampleSpec(SampleTerms(sampling, prompt, output), len(output))
    kept = logits.clone()
    sampler.sample(kept, [("a", spec)], Sampled())
    seen.append(kept)
    return seen[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_equals_that_of_transformers(dtype: torch.dtype, penalty: float) -> None:
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    for seed, (prompt, output) in enumerate(histories(20)):
        logits = row(seed, dtype)
        expected = reference(torch.tensor([prompt + output]), logits)
        sampling = replace(GREEDY, repetition_penalty=penalty)
        assert torch.equal(changed(logits, sampling, prompt, output), expected)


@pytest.mark.parametrize(("presence", "frequency"), [(0.7, 0.0), (0.0, -1.3), (2.0, 0.3)])
@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_presence_and_frequency_follow_the_formula(
    presence: float, frequency: float, repetition: float
) -> None:
    """After the repetition penalty, on counts of the output alone."""
    for seed, (prompt, output) in enumerate(histories(20)):
        logits = row(seed)
        expected = RepetitionPenaltyLogitsProcessor(repetition)(
            torch.tensor([prompt + output]), logits
        )
        for token, count in Counter(output).items():
            expected[0, token] -= count * frequency + presence
        sampling = replace(
            GREEDY,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
        )
        actual = changed(logits, sampling, prompt, output)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_logit_bias_equals_that_of_transformers() -> None:
    pairs = ((3, -100.0), (5, 2.5), (39, 100.0))
    reference = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in pairs])
    for seed, (prompt, output) in enumerate(histories(5)):
        logits = row(seed)
        expected = reference(torch.tensor([prompt + output]), logits)
        actual = changed(logits, replace(GREEDY, logit_bias=pairs), prompt, output)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)


def test_bad_words_equal_those_of_transformers() -> None:
    """They may begin in the prompt; single tokens are never chosen."""
    bad_words = ((7,), (1, 2), (1, 3), (4, 5, 6), (5, 5, 5), (8, 8))
    reference = NoBadWordsLogitsProcessor([list(word) for word in bad_words])
    banned: Counter[int] = Counter()
    rng = random.Random(0)
    for seed in range(300):
        tokens = [rng.randrange(9) for _ in range(rng.randint(4, 12))]
        split = rng.randint(1, len(tokens))
        logits = row(seed)
        expected = reference(torch.tensor([tokens]), logits)
        prompt, output = tuple(tokens[:split]), tuple(tokens[split:])
        actual = changed(logits, replace(GREEDY, bad_words=bad_words), prompt, output)
        assert torch.equal(actual, expected)
        banned.update((actual[0] == -torch.inf).nonzero().flatten().tolist())
    assert set(banned) == {2, 3, 5, 6, 7, 8}


def test_bad_words_forbid_the_tokens_of_the_word_alone() -> None:
    """As in vLLM: neither another tokenisation of the word nor a longer token that contains it."""
    pieces = ["P", "a", "r", "i", "s", "\u0120", "Pa", "ri", "Pari", "Paris", "\u0120Paris"]
    merges = ["P a", "r i", "Pa ri", "Pari s", "\u0120 Paris"]
    backend = Backend(
        BPE({piece: i for i, piece in enumerate(pieces)}, [tuple(m.split()) for m in merges])  # type: ignore[misc]
    )
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    word_ids = bad_word_ids(["Pari"], Tokenizer(backend))
    assert word_ids == ((pieces.index("Pari"),), (pieces.index("\u0120"), pieces.index("Pari")))
    word_ids = bad_word_ids(["Paris"], Tokenizer(backend))
    sampling = replace(GREEDY, bad_words=word_ids)

    def forbidden(*output: str) -> set[str]:
        ids = tuple(map(pieces.index, output))
        (kept,) = changed(torch.zeros(1, len(pieces)), sampling, (0,), ids)
        return {piece for piece, logit in zip(pieces, kept, strict=True) if logit == -torch.inf}

    assert forbidden() == {"Paris", "\u0120Paris"}
    assert forbidden("Pari") == {"Paris", "\u0120Paris"}, (
        "then s, which spells the word, is allowed"
    )


def test_only_allowed_tokens_remain() -> None:
    allowed = (3, 5, 31)
    actual = changed(row(0), replace(GREEDY, allowed_token_ids=allowed), (1,), ())
    assert torch.equal(actual[0, list(allowed)], row(0)[0, list(allowed)])
    assert (actual > -torch.inf).sum() == len(allowed)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 0.999])
def test_min_p_equals_that_of_transformers(min_p: float) -> None:
    choose_token, draws = TokenChooser(Scratch.of(VOCAB, np.float64)), np.arange(1000) / 1000
    for seed in range(20):
        logits = row(seed)
        temperature = 0.5 + seed / 10
        expected = MinPLogitsWarper(min_p)(torch.tensor([[0]]), logits / temperature)
        terms = [DrawTerms(temperature, top_k=0, top_p=1.0, min_p=min_p)] * len(draws)
        tokens, _ = choose_token(logits.expand(len(draws), -1).numpy(), terms, draws)
        kept = (expected[0] > -torch.inf).nonzero().flatten()
        assert set(tokens) <= set(kept.tolist())
        weights = torch.softmax(expected[0], -1)
        assert {token for token in kept.tolist() if weights[token] > 2e-3} <= set(tokens)


def test_incremental_history_equals_whole_history() -> None:
    sampling = Sampling(
        0.8,
        seed=5,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        repetition_penalty=1.2,
        logit_bias=((3, 1.5),),
        bad_words=((1, 2), (9,)),
        allowed_token_ids=tuple(range(30)),
    )
    sampler = Sampler(VOCAB, Grammars(NO_FOLDER, VOCAB), torch.float64)
    prompt, output = (1, 2, 3, 39), []
    for index in range(200):
        logits = row(index)
        terms = SampleTerms(sampling, prompt) if index == 0 else None
        since = tuple(output[-1:]) if index else ()
        made = Sampled()
        sampler.sample(logits.clone(), [("a", SampleSpec(terms, index, since))], made)
        at_once = SampleTerms(sampling, prompt, tuple(output))
        assert made.tokens == {"a": tokens_of(logits, [at_once])[0]}
        output.append(made.tokens["a"])
    assert len(set(output)) > 10


def test_rows_with_rules_do_not_depend_on_their_batch() -> None:
    rng = random.Random(4)
    terms = []
    for number, (prompt, output) in enumerate(histories(24)):
        sampling = Sampling(
            0.7 * (number % 2),
            seed=number,
            presence_penalty=rng.choice([0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.5]),
            logit_bias=rng.choice([(), ((4, 2.0),)]),
            bad_words=rng.choice([(), ((*(prompt + output)[-1:], 6),)]),
            allowed_token_ids=rng.choice([(), tuple(range(20))]),
            min_p=rng.choice([0.0, 0.1]),
        )
        stops = frozenset(rng.sample(range(VOCAB), 3))
        top = rng.choice([None, 0, 3])
        terms.append(SampleTerms(sampling, prompt, output, stops, rng.choice([0, 50]), top))
    logits = torch.cat([row(number, torch.float32) for number in range(24)])
    together = choose(logits, terms)
    for number, term in enumerate(terms):
        alone = choose(logits[number : number + 1], [term])
        assert together.tokens[str(number)] == alone.tokens["0"]
        assert together.logprobs.get(str(number)) == alone.logprobs.get("0")


def test_contradicting_rules_fail_the_request_alone() -> None:
    nothing = replace(GREEDY, allowed_token_ids=(3, 4), bad_words=((3,),))
    terms = [
        SampleTerms(GREEDY),
        SampleTerms(nothing, stop_ids=frozenset({4}), min_tokens=2),
        SampleTerms(nothing, stop_ids=frozenset({4}), min_tokens=2, top_logprobs=2),
        SampleTerms(nothing, stop_ids=frozenset({4}), min_tokens=2),
    ]
    logits = torch.cat([row(number) for number in range(4)])
    made = choose(logits, terms, [0, 0, 1, 2])
    assert made.failed == {"1": NOTHING_LEFT, "2": NOTHING_LEFT}
    assert made.tokens == {"0": int(logits[0].argmax()), "3": 4}


def test_a_request_without_terms_is_an_error() -> None:
    sampler = Sampler(VOCAB, Grammars(NO_FOLDER, VOCAB), torch.float64)
    with pytest.raises(InvalidBatch, match="never received"):
        sampler.sample(row(0), [("a", SampleSpec(None, 1))], Sampled())


def test_a_request_without_blocks_is_forgotten() -> None:
    sampler = Sampler(VOCAB, Grammars(NO_FOLDER, VOCAB), torch.float64)
    for name in ("a", "b", "c"):
        sampler.sample(row(0), [(name, SampleSpec(SampleTerms(GREEDY), 0))], Sampled())
    sampler.keep_only({"b", "other"})
    assert len(sampler) == 1
    sampler.sample(row(0), [("b", SampleSpec(None, 1))], Sampled())


def test_a_long_history_costs_no_more_for_each_token() -> None:
    """Counts grow by doubling and are never rebuilt."""
    terms = SampleTerms(replace(GREEDY, frequency_penalty=0.1))
    rules = SamplingRules(terms, VOCAB, Grammars(NO_FOLDER, VOCAB))
    assert rules.counts is not None
    for token in range(5000):
        rules.add((token,))
    assert rules.counts.ids.tolist() == list(range(5000))
    assert set(rules.counts.counts.tolist()) == {1.0}
