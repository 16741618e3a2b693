"""The journal keeps tokens in order, each once."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.request import TokenLogprobs
from services.gateway.cluster.journal import Journal, JournalError
from services.gateway.vocabulary.message import Finish, TokenEvent


def apply(
    journal: Journal,
    first_index: int,
    token_ids: Sequence[int],
    finish: Finish | None = None,
    message: str = "",
    logprobs: Sequence[TokenLogprobs] = (),
) -> int:
    """Add an event to the journal."""
    ids, rows = tuple(token_ids), tuple(logprobs)
    return journal.apply(TokenEvent("r", first_index, ids, finish, message, logprobs=rows))


@given(
    tokens=st.lists(st.integers(0, 1000), max_size=20),
    windows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=20),
)
def test_duplicates_in_any_order_change_nothing(
    tokens: list[int], windows: list[tuple[int, int]]
) -> None:
    journal = Journal(len(tokens))
    for back, length in windows:
        before = len(journal.token_ids)
        first = max(0, before - back)
        sent = tokens[first : first + length]
        assert apply(journal, first, sent) == max(0, first + len(sent) - before)
        assert journal.token_ids == tokens[: max(before, first + len(sent))]
    apply(journal, len(journal.token_ids), tokens[len(journal.token_ids) :], Finish.LENGTH)
    for back, _ in windows:
        first = max(0, len(tokens) - back)
        assert apply(journal, first, tokens[first:], Finish.LENGTH) == 0
    assert (journal.token_ids, journal.finish) == (tokens, Finish.LENGTH)


@pytest.mark.parametrize("first_index", [-1, 2, 10])
def test_a_gap_is_an_error_and_changes_nothing(first_index: int) -> None:
    journal = Journal(10)
    apply(journal, 0, [7])
    with pytest.raises(JournalError, match="1 was expected"):
        apply(journal, first_index, [8])
    assert journal.token_ids == [7]


def test_more_tokens_than_allowed_is_an_error() -> None:
    journal = Journal(2)
    with pytest.raises(JournalError, match="allowed 2"):
        apply(journal, 0, [1, 2, 3])
    assert journal.token_ids == []


def test_events_after_the_end_are_ignored() -> None:
    journal = Journal(5)
    apply(journal, 0, [1], Finish.STOP)
    for news in ([2], []):
        with pytest.raises(JournalError, match="after the end"):
            apply(journal, 1, news, Finish.LENGTH)
    assert journal.finish is Finish.STOP


def test_the_final_message_is_kept() -> None:
    journal = Journal(5)
    apply(journal, 0, [], Finish.INVALID, "no")
    assert journal.message == "no"


def test_log_probabilities_stay_with_their_tokens() -> None:
    journal = Journal(9)
    rows = [TokenLogprobs(-float(i), i) for i in range(4)]
    apply(journal, 0, [5, 6], logprobs=rows[:2])
    apply(journal, 1, [6, 7, 8], logprobs=rows[1:])
    assert (journal.token_ids, journal.logprobs) == ([5, 6, 7, 8], rows)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_tokens_of_which_only_some_have_log_probabilities_are_an_error(rows: int) -> None:
    journal = Journal(9)
    some = [TokenLogprobs(-1.0, 1)] * 3
    apply(journal, 0, [5], logprobs=some[:1])
    with pytest.raises(JournalError):
        apply(journal, 1, [6, 7], logprobs=some[:rows])
    assert (journal.token_ids, journal.logprobs) == ([5], some[:1])


def test_log_probabilities_are_returned_once() -> None:
    rows = [TokenLogprobs(-float(i), 1) for i in range(4)]
    journal = Journal(10)
    apply(journal, 0, [5, 6], logprobs=rows[:2])
    assert list(journal.take_logprobs()) == rows[:2]
    assert list(journal.take_logprobs()) == []
    # A worker that has taken over repeats them.
    apply(journal, 1, [6, 7, 8], logprobs=rows[1:])
    assert list(journal.take_logprobs()) == rows[2:]
    with pytest.raises(JournalError, match="only some"):
        apply(journal, 4, [9])
