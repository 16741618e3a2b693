"""Text, stop strings and token counts do not depend on how tokens were grouped."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.request import FinishReason, Limits, Request, Sampling, TokenLogprobs
from services.gateway.detokenizer import Detokenizer
from services.gateway.message import Finish
from services.gateway.output import Fresh, OutputText, Piece
from services.gateway.prepared import PreparedChoice


def decode(ids: Sequence[int]) -> str:
    """Token i is the i-th letter."""
    return "".join(chr(ord("a") + i) for i in ids)


def choice(stop: Sequence[str] = (), min_tokens: int = 0) -> PreparedChoice:
    """A choice whose only token of the model's own that ends it is 25."""
    limits = Limits(100, min_tokens, frozenset({24, 25}))
    request = Request("r", (1,), Sampling(), limits, arrival_s=0.0)
    return PreparedChoice(request, "m", tuple(stop), eos_ids=frozenset({25}))


def output_of(
    groups: Sequence[Sequence[int]],
    finish: Finish,
    stop: Sequence[str] = (),
    min_tokens: int = 0,
) -> tuple[str, int, FinishReason | None]:
    """Text, tokens and reason when tokens come in `groups`, the last with `finish`."""
    output = OutputText(choice(stop, min_tokens), Detokenizer(decode))
    text, tokens = "", 0
    for number, group in enumerate(groups):
        piece = output.push(Fresh(group, finish if number == len(groups) - 1 else None))
        text += piece.text
        tokens += len(piece.token_ids)
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


@pytest.mark.parametrize(
    ("ids", "finish", "stop", "expected"),
    [
        ([0, 25], Finish.STOP, [], None),
        ([0, 24], Finish.STOP, [], 24),
        ([0, 1, 2], Finish.LENGTH, ["bc", "c"], "bc"),
        ([0, 1], Finish.LENGTH, ["c"], None),
    ],
)
def test_what_of_the_client_has_stopped_the_output_is_told(
    ids: list[int], finish: Finish, stop: list[str], expected: int | str | None
) -> None:
    piece = OutputText(choice(stop), Detokenizer(decode)).push(Fresh(ids, finish))
    assert piece.stop_reason == expected


def test_log_probabilities_end_with_the_tokens_that_count() -> None:
    told = [TokenLogprobs(-float(i), i) for i in range(4)]
    output = OutputText(choice(["b"]), Detokenizer(decode))
    piece: Piece = output.push(Fresh([0, 1, 2, 3], None, told, told[:1]))
    assert (piece.token_ids, piece.logprobs) == ((0, 1), tuple(told[:2]))
    assert piece.prompt_logprobs == tuple(told[:1])
