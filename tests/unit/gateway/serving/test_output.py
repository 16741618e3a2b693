"""Text, stop strings and token counts do not depend on the grouping of tokens."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.request import (
    NO_LOGPROBS,
    FinishReason,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
    TokenLogprobs,
)
from services.gateway.serving.output import Output, OutputPiece, OutputText, TokenWithLogprobs
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.tools.format import ChatForm, Thinking
from services.gateway.vocabulary.message import Finish, UnreadTokens
from tests.support.cuttings import cuttings


def decode(ids: Sequence[int]) -> str:
    """Token i becomes the i-th letter."""
    return "".join(chr(ord("a") + i) for i in ids)


def choice(
    stop: Sequence[str] = (),
    min_tokens: int = 0,
    logprobs: LogprobOptions = NO_LOGPROBS,
    prompt_ids: tuple[int, ...] = (1,),
    **more: Any,
) -> PreparedChoice:
    """A choice of a model whose only stop token is 25."""
    limits = Limits(100, min_tokens, frozenset({24, 25}))
    request = Request("r", prompt_ids, Sampling(), limits, arrival_s=0.0, logprobs=logprobs)
    return PreparedChoice(request, "m", tuple(stop), eos_ids=frozenset({25}), **more)


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
        piece = output.push(UnreadTokens(group, finish if number == len(groups) - 1 else None))
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
def test_output_does_not_depend_on_token_grouping(
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
def test_finish_reasons_are_reported(
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
def test_the_matched_stop_of_the_client_is_reported(
    ids: list[int], finish: Finish, stop: list[str], expected: int | str | None
) -> None:
    piece = OutputText(choice(stop), Detokenizer(decode)).push(UnreadTokens(ids, finish))
    assert piece.stop_reason == expected


def logprobs_of(count: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(-float(i), i) for i in range(count)]


def test_log_probabilities_end_with_the_counted_tokens() -> None:
    output = OutputText(choice(["b"], logprobs=LogprobOptions(0)), Detokenizer(decode))
    piece: OutputPiece = output.push(UnreadTokens([0, 1, 2, 3], None, logprobs_of(4)))
    assert piece.token_ids == (0, 1)
    assert piece.logprobs == (
        TokenWithLogprobs(0, 0, logprobs_of(2)[0]),
        TokenWithLogprobs(1, 1, logprobs_of(2)[1]),
    )


def test_a_stop_token_has_a_log_probability_and_no_text() -> None:
    output = OutputText(choice(logprobs=LogprobOptions(0)), Detokenizer(decode))
    piece = output.push(UnreadTokens([3, 25], Finish.STOP, logprobs_of(2)))
    assert (piece.text, piece.token_ids) == ("d", (3, 25))
    assert [note.offset for note in piece.logprobs] == [0, 1]


@pytest.mark.parametrize("groups", [[[0, 1, 2, 3]], [[0], [1, 2], [3]]])
def test_offsets_are_those_of_complete_characters(groups: list[list[int]]) -> None:
    def halves(ids: Sequence[int]) -> str:
        """Two tokens form a letter."""
        return "x" * (len(ids) // 2) + "\ufffd" * (len(ids) % 2)

    output = OutputText(choice(logprobs=LogprobOptions(0)), Detokenizer(halves))
    pieces = [output.push(UnreadTokens(ids, None, logprobs_of(len(ids)))) for ids in groups]
    assert [note.offset for piece in pieces for note in piece.logprobs] == [0, 0, 1, 1]


def test_token_details_are_collected_only_on_request() -> None:
    output = OutputText(choice(), Detokenizer(decode))
    assert output.push(UnreadTokens([0, 1], None, logprobs_of(2), logprobs_of(1))) == OutputPiece(
        "ab", (0, 1)
    )


@pytest.mark.parametrize("echo", ["", "say: bcd"])
def test_an_echo_comes_first_and_moves_the_offsets(echo: str) -> None:
    options = LogprobOptions(0, 0)
    asked = choice(logprobs=options, prompt_ids=(1, 2, 3), echo=echo)
    output = OutputText(asked, Detokenizer(decode), Detokenizer(decode))
    first = output.push(UnreadTokens([4], None, logprobs_of(1), logprobs_of(2)))
    assert first.text == f"{echo}e"
    assert [note.token_id for note in first.prompt_logprobs] == [1, 2, 3]
    assert [note.logprobs for note in first.prompt_logprobs] == [None, *logprobs_of(2)]
    offsets = [note.offset for note in (*first.prompt_logprobs, *first.logprobs)]
    assert offsets == ([0, 1, 2, 8] if echo else [0, 0, 0, 0])
    second = output.push(UnreadTokens([5], None, logprobs_of(1)))
    assert (second.text, second.prompt_logprobs) == ("f", ())
    assert second.logprobs[0].offset == len(echo) + 1


def test_a_prompt_only_echo_shows_no_output() -> None:
    asked = choice(logprobs=LogprobOptions(0, 0), prompt_ids=(1, 2), echo="bc", prompt_only=True)
    output = OutputText(asked, Detokenizer(decode), Detokenizer(decode))
    piece = output.push(UnreadTokens([4], Finish.LENGTH, logprobs_of(1), logprobs_of(1)))
    assert (piece.text, piece.token_ids, piece.logprobs) == ("bc", (), ())
    assert piece.finish_reason is FinishReason.LENGTH
    assert [note.token_id for note in piece.prompt_logprobs] == [1, 2]


@pytest.mark.parametrize(
    ("ids", "finish", "text"),
    [
        ([0, 1, 2, 3], Finish.LENGTH, "abc"),
        ([0, 24], Finish.STOP, "ay"),
        ([0, 25], Finish.STOP, "az"),
        ([0, 1], Finish.LENGTH, "ab"),
    ],
)
def test_the_matched_stop_is_included_on_request(ids: list[int], finish: Finish, text: str) -> None:
    output = OutputText(choice(["bc"], include_stop=True), Detokenizer(decode))
    assert output.push(UnreadTokens(ids, finish)).text == text


def test_pieces_concatenate_to_the_output() -> None:
    output = Output()
    notes = tuple(TokenWithLogprobs(number, number, None) for number in range(3))
    output.add(OutputPiece("a", (0,), logprobs=notes[:1], prompt_logprobs=notes))
    output.add(OutputPiece("bc", (1, 2), FinishReason.STOP, 9, logprobs=notes[1:]))
    assert (output.text, output.token_ids) == ("abc", [0, 1, 2])
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 9)
    assert (tuple(output.logprobs), output.prompt_logprobs) == (notes, notes)


@pytest.mark.parametrize(
    ("thinking", "text", "expected"),
    [
        (Thinking.OPENED, "hi</think>\n\nhello hi there", "hi</think>\n\nhello "),
        (Thinking.POSSIBLE, " <think>hi</think>hello hi there", " <think>hi</think>hello "),
        (Thinking.POSSIBLE, "hello hi there", "hello "),
        (Thinking.POSSIBLE, "hi <think>", ""),
        (Thinking.OVER, "hi</think>hello", ""),
        (None, "hi</think>hello", ""),
        (Thinking.OPENED, "hi, hi, hi", "hi, hi, hi"),
        (Thinking.POSSIBLE, " <thi", " <t"),
    ],
)
def test_stop_strings_apply_to_the_answer_and_not_to_reasoning(
    thinking: Thinking | None, text: str, expected: str
) -> None:
    chat = ChatForm(thinking=thinking)
    for pieces in cuttings(text, seed=len(text)):
        letters = Detokenizer(lambda ids: "".join(map(chr, ids)))
        output = OutputText(choice(["hi"], chat=chat), letters)
        sent = ""
        for piece in [*pieces, None]:
            ids = tuple(map(ord, piece or ""))
            made = output.push(UnreadTokens(ids, Finish.LENGTH if piece is None else None))
            sent += made.text
            if made.finish_reason is not None:
                break
        assert sent == expected
        assert made.stop_reason == (None if expected == text else "hi")
