"""Reasoning is separated from the answer, with any chunking."""

from random import Random

import pytest

from services.gateway.tools.event import Content, Reasoning
from services.gateway.tools.reasoning import AnswerStart, ReasoningSplit
from tests.support.cuttings import cuttings, parsed


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "answer"),
    [
        (False, "", "", ""),
        (False, " an answer <think> \n", "", " an answer <think> \n"),
        (False, "<think>\nhm, a < b\n</think>\n\nYes. ", "hm, a < b", "Yes. "),
        (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (False, " <think>hm</think>Yes.</think>", "hm", "Yes.</think>"),
        (False, "<think>for ever \n", "for ever", ""),
        (False, "<think>hm</thi", "hm</thi", ""),
        (False, "<think>hm \n</thi", "hm \n</thi", ""),
        (False, "<thin", "", "<thin"),
        (False, "hm</think>Yes.", "", "hm</think>Yes."),
        (True, "hm\n</think>\n\nYes.", "hm", "Yes."),
        (True, "<think>hm</think> Yes.", "hm", "Yes."),
        (True, "\nfor ever", "for ever", ""),
        (True, "</think>Yes.", "", "Yes."),
        (True, "<thi", "<thi", ""),
        (True, "", "", ""),
    ],
)
def test_reasoning_formats_are_split(opened: bool, text: str, reasoning: str, answer: str) -> None:
    expected = [Reasoning(reasoning)] * bool(reasoning) + [Content(answer)] * bool(answer)

    for pieces in cuttings(text, seed=len(text)):
        assert parsed(ReasoningSplit(opened), pieces) == expected


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_splitting_does_not_depend_on_chunking(opened: bool, seed: int) -> None:
    rng = Random(seed)
    vocabulary = ["<think>", "</think>", "<", "think>", " ", "\n", "a", "é"]
    text = "".join(rng.choice(vocabulary) for _ in range(rng.randrange(12)))
    whole = parsed(ReasoningSplit(opened), [text])

    assert all(parsed(ReasoningSplit(opened), pieces) == whole for pieces in cuttings(text, seed))


def test_text_is_held_back_only_for_a_possible_marker() -> None:
    split = ReasoningSplit(opened=True)

    assert split.push("one ") == [Reasoning("one")]
    assert split.push("two") == [Reasoning(" two")]
    assert split.push("</think>\n\nthree ") == [Content("three ")]


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_the_answer_starts_where_the_split_has_content(opened: bool, seed: int) -> None:
    rng = Random(seed)
    vocabulary = ["<think>", "</think>", "<", "think>", " ", "\n", "a", "é"]
    text = "".join(rng.choice(vocabulary) for _ in range(rng.randrange(12)))
    answer = "".join(
        event.text for event in parsed(ReasoningSplit(opened), [text]) if isinstance(event, Content)
    )

    for pieces in cuttings(text, seed):
        start = AnswerStart(opened)
        splits = [start.split(piece) for piece in pieces]
        end = start.flush()
        assert "".join(second for _, second in splits) + end == answer
        assert "".join(first + second for first, second in splits) + end == text
