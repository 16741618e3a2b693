"""Log probabilities of raw logits: of the token, its rank, and the best ones."""

from collections.abc import Sequence

import pytest
import torch

from services.core.logprobs import LogprobRows, joined, newest_rows
from services.core.planner.batch import SampleTerms
from services.core.request import Sampling, TokenLogprobs
from services.worker.engine.sampling.grammar import Grammars
from services.worker.engine.sampling.sampler import Sampler
from tests.support.sampling import NO_FOLDER, choose

GREEDY = Sampling(temperature=0.0)


def scored(logits: torch.Tensor, tokens: Sequence[int], top: int) -> LogprobRows:
    """The sampler's scores of `tokens[i]` after row i."""
    vocab = logits.shape[1]
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return Sampler(vocab, Grammars(NO_FOLDER, vocab), dtype).score(logits, tokens, top)


def oracle(row: list[float], token: int, top: int) -> tuple[float, int, list[tuple[int, float]]]:
    """The result by definition."""
    logprobs = torch.log_softmax(torch.tensor(row, dtype=torch.float64), -1).tolist()
    order = sorted(range(len(row)), key=lambda candidate: (-row[candidate], candidate))
    rank = 1 + sum(other > row[token] for other in row)
    return logprobs[token], rank, [(token_id, logprobs[token_id]) for token_id in order[:top]]


def check(actual: TokenLogprobs, row: list[float], token: int, top: int) -> None:
    logprob, rank, best = oracle(row, token, top)
    assert actual.rank == rank
    assert actual.logprob == pytest.approx(logprob, abs=1e-5)
    assert [token_id for token_id, _ in actual.top] == [token_id for token_id, _ in best]
    assert [logprob for _, logprob in actual.top] == pytest.approx(
        [logprob for _, logprob in best], abs=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 5, 20, 299, 300])
def test_rows_match_the_definition(dtype: torch.dtype, top: int) -> None:
    logits = (4 * torch.randn(7, 300, generator=torch.Generator().manual_seed(top))).to(dtype)
    tokens = [0, 299, 5, int(logits[3].argmax()), 8, 9, 10]
    actual = scored(logits, tokens, top)
    assert len(actual) == 7
    for row_logprobs, row, token in zip(
        actual.unpacked(), logits.double().tolist(), tokens, strict=True
    ):
        check(row_logprobs, row, token, top)


def test_ties_are_ordered_by_token_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0] * 6])
    first, second = scored(logits, (4, 5), 4).unpacked()
    assert [token for token, _ in first.top] == [1, 3, 0, 2]
    assert [token for token, _ in second.top] == [0, 1, 2, 3]
    assert (first.rank, second.rank) == (3, 1)


def test_log_probabilities_precede_all_logit_processing() -> None:
    logits = 2 * torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    best = int(logits[1].argmax())
    terms = [
        SampleTerms(Sampling(0.3, top_k=2, seed=1), top_logprobs=3),
        SampleTerms(Sampling(0.0, bad_words=((best,),)), top_logprobs=3),
        SampleTerms(
            GREEDY, stop_ids=frozenset({int(logits[2].argmax())}), min_tokens=1, top_logprobs=2
        ),
    ]
    made = choose(logits, terms)
    for row, term in enumerate(terms):
        (actual,) = made.logprobs[str(row)].unpacked()
        assert term.top_logprobs is not None
        check(actual, logits[row].tolist(), made.tokens[str(row)], term.top_logprobs)
    assert made.logprobs["1"].unpacked()[0].top[0][0] == best != made.tokens["1"]


def test_log_probabilities_are_returned_only_on_request() -> None:
    logits = torch.randn(3, 50)
    made = choose(
        logits,
        [
            SampleTerms(GREEDY),
            SampleTerms(GREEDY, top_logprobs=0),
            SampleTerms(GREEDY, top_logprobs=2),
        ],
    )
    assert set(made.logprobs) == {"1", "2"}
    assert [rows.top for rows in made.logprobs.values()] == [0, 2]


def test_rows_are_sliced_and_concatenated() -> None:
    logits = torch.randn(9, 50)
    rows = scored(logits, range(9), 3)
    assert joined([rows.rows(0, 4), rows.rows(4)]) == rows == rows.rows(0, 2) + rows.rows(2)
    assert rows.rows(3, 5).unpacked() == rows.unpacked()[3:5]
    assert rows.rows(-2).unpacked() == rows.unpacked()[-2:]
    assert len(rows.rows(20)) == len(rows.rows(5, 3)) == len(LogprobRows(3)) == 0
    row_bytes = 2 * 4 * (1 + 3)
    assert newest_rows([rows, rows], 10 * row_bytes) == joined([rows.rows(8), rows])
    assert newest_rows([rows], 100 * row_bytes) == rows
    assert newest_rows([], 100) is None
