"""The journal keeps tokens in order, each once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.journal import Journal, JournalError
from services.gateway.message import Finish


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
        assert journal.apply(first, sent) == max(0, first + len(sent) - before)
        assert journal.token_ids == tokens[: max(before, first + len(sent))]
    journal.apply(len(journal.token_ids), tokens[len(journal.token_ids) :], Finish.LENGTH)
    for back, _ in windows:
        first = max(0, len(tokens) - back)
        assert journal.apply(first, tokens[first:], Finish.LENGTH) == 0
    assert (journal.token_ids, journal.finish) == (tokens, Finish.LENGTH)


@pytest.mark.parametrize("first_index", [-1, 2, 10])
def test_a_gap_is_an_error_and_changes_nothing(first_index: int) -> None:
    journal = Journal(10)
    journal.apply(0, [7])
    with pytest.raises(JournalError, match="1 was next"):
        journal.apply(first_index, [8])
    assert journal.token_ids == [7]


def test_more_tokens_than_allowed_is_an_error() -> None:
    journal = Journal(2)
    with pytest.raises(JournalError, match="allowed 2"):
        journal.apply(0, [1, 2, 3])
    assert journal.token_ids == []


def test_nothing_new_comes_after_the_end() -> None:
    journal = Journal(5)
    journal.apply(0, [1], Finish.STOP)
    for news in ([2], []):
        with pytest.raises(JournalError, match="after the end"):
            journal.apply(1, news, Finish.LENGTH)
    assert journal.finish is Finish.STOP


def test_the_message_of_the_end_is_kept() -> None:
    journal = Journal(5)
    journal.apply(0, [], Finish.INVALID, "no")
    assert journal.message == "no"
