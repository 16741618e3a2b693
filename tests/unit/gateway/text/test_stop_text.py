"""Stop strings are found with any chunking of the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.serving.output import StopText


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """The emitted text, and whether a stop string ended it."""
    stop = StopText(stops)
    shown = ""
    for piece in pieces:
        shown += stop.push(piece)
        if stop.hit:
            return shown, True
    return shown + stop.flush(), False


def expected(stops: list[str], text: str) -> tuple[str, bool]:
    """The same by definition: the earliest end, then the longest string, takes precedence."""
    for end in range(len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_stop_matching_does_not_depend_on_chunking(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == expected(stops, "".join(pieces))


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["the E", "N", "D of it"], "the "),
        (["abcd", "bc"], ["abcd"], "a"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo"),
        (["é"], ["caf", "é"], "caf"),
    ],
)
def test_documented_stop_examples(stops: list[str], pieces: list[str], shown: str) -> None:
    assert run(stops, pieces) == (shown, True)


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stop = StopText(["STOP"])
    assert stop.push("a ST") == "a "
    assert stop.push("ART") == "START"
    assert stop.push(" S") == " "
    assert stop.flush() == "S"


def test_text_passes_at_once_without_stop_strings() -> None:
    assert StopText([]).push("as it is") == "as it is"
