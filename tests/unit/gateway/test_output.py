"""Text, stop strings and token counts do not depend on how tokens were grouped."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.request import FinishReason, Limits, Sampling
from services.gateway.detokenizer import Detokenizer
from services.gateway.message import Finish, Job
from services.gateway.output import OutputText


def decode(ids: Sequence[int]) -> str:
    """Token i is the i-th letter."""
    return "".join(chr(ord("a") + i) for i in ids)


def output_of(
    groups: Sequence[Sequence[int]],
    finish: Finish,
    stop: Sequence[str] = (),
    min_tokens: int = 0,
) -> tuple[str, int, FinishReason | None]:
    """Text, tokens and reason when tokens come in `groups`, the last with `finish`."""
    job = Job("r", "m", (1,), Sampling(), Limits(100, min_tokens), tuple(stop))
    output = OutputText(job, Detokenizer(decode))
    text, tokens = "", 0
    for number, group in enumerate(groups):
        piece = output.push(group, finish if number == len(groups) - 1 else None)
        text += piece.text
        tokens += piece.tokens
        if piece.finish_reason is not None:
            return text, tokens, piece.finish_reason
    return text, tokens, None


@given(
    ids=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    cuts=st.sets(st.integers(1, 19)),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    min_tokens=st.integers(0, 5),
    finish=st.sampled_from([Finish.STOP, Finish.LENGTH]),
)
def test_grouping_makes_no_difference(
    ids: list[int], cuts: set[int], stop: list[str], min_tokens: int, finish: Finish
) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    groups = [ids[a:b] for a, b in itertools.pairwise(edges)]
    one_by_one = [[i] for i in ids]
    together = output_of(groups, finish, stop, min_tokens)
    assert together == output_of(one_by_one, finish, stop, min_tokens)


@pytest.mark.parametrize(
    ("ids", "finish", "stop", "expected"),
    [
        ([0, 1, 2], Finish.LENGTH, [], ("abc", 3, FinishReason.LENGTH)),
        ([0, 1, 2], Finish.STOP, [], ("ab", 3, FinishReason.STOP)),
        ([0, 1, 2, 0], Finish.LENGTH, ["bc"], ("a", 3, FinishReason.STOP)),
        ([0, 1], Finish.LENGTH, ["bc"], ("ab", 2, FinishReason.LENGTH)),
    ],
)
def test_endings(
    ids: list[int], finish: Finish, stop: list[str], expected: tuple[str, int, FinishReason]
) -> None:
    assert output_of([ids], finish, stop) == expected


def test_stop_strings_count_only_after_min_tokens() -> None:
    assert output_of([[0, 0, 0]], Finish.LENGTH, ["a"], min_tokens=2)[:2] == ("aa", 3)
