"""The text of a chat becomes reasoning, content and calls, piece by piece."""

import itertools
from dataclasses import replace

import pytest
from msgspec import structs

from services.core.request import FinishReason
from services.gateway.serving.chat_output import ChatOutput, call_id
from services.gateway.serving.output import Output, OutputPiece, TokenWithLogprobs
from services.gateway.tools.format import ChatForm, Thinking, ToolFormat
from services.gateway.vocabulary.delta import (
    AccumulatedCall,
    AnswerAccumulator,
    Delta,
    ToolCallDelta,
)
from tests.support.cuttings import cuttings

HERMES = ChatForm(ToolFormat.HERMES, frozenset({"get"}), Thinking.POSSIBLE)
CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'


def parsed(
    form: ChatForm, pieces: list[str], finish: FinishReason = FinishReason.STOP
) -> tuple[AnswerAccumulator, list[Delta]]:
    """The parsed output, and its deltas."""
    ids = itertools.count()
    output, total, deltas = ChatOutput(form, lambda _: f"id{next(ids)}"), Output(), []
    for number, text in enumerate(pieces):
        last = number == len(pieces) - 1
        pieces_of = output.push(OutputPiece(text, (1,), finish if last else None))
        assert pieces_of[0].text == text and pieces_of[0].token_ids == (1,)
        for piece in pieces_of:
            total.add(piece)
            deltas.append(piece.parsed)
    assert total.text == "".join(pieces) and len(total.token_ids) == len(pieces)
    return total.parsed, deltas


def test_all_parts_are_parsed_with_any_chunking() -> None:
    text = f"<think>\nhm\n</think>\n\nLet me see.\n\n{CALL}\n{CALL}"

    for pieces in cuttings(text, seed=1):
        whole, deltas = parsed(HERMES, pieces)

        assert whole.reasoning == "hm"
        assert whole.content == "Let me see."
        calls = [
            AccumulatedCall("id0", "get", '{"a": 1}'),
            AccumulatedCall("id1", "get", '{"a": 1}'),
        ]
        assert whole.calls == calls
        assert whole.finish_reason == "tool_calls"
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        ended = [call.index for delta in deltas for call in delta.tool_calls if call.ended]
        assert ended == [0, 1]


def test_a_call_is_streamed_in_pieces() -> None:
    _, deltas = parsed(HERMES, ['<tool_call>{"name": "get", "arguments": {', '"a"', ": 1}}", ""])

    assert deltas == [
        Delta(tool_calls=(ToolCallDelta(0, "id0", "get", "{"),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments='"a"'),)),
        Delta(tool_calls=(ToolCallDelta(0, arguments=": 1}", ended=True),)),
        Delta(finish_reason="tool_calls"),
    ]


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        ("no call", FinishReason.STOP, "stop"),
        ("no call", FinishReason.LENGTH, "length"),
        (CALL, FinishReason.LENGTH, "length"),
        ('<tool_call>{"name": "get", "arguments": {"a', FinishReason.LENGTH, "length"),
        ('<tool_call>{"name": "get", "arguments": {"a', FinishReason.STOP, "stop"),
        ('<tool_call>{"name": "get"', FinishReason.STOP, "stop"),
        ('<tool_call>{"name": "get", "arguments": {"a": tru}}', FinishReason.STOP, "stop"),
        (f'{CALL}<tool_call>{{"name": "get", "arguments": {{"a', FinishReason.STOP, "tool_calls"),
        (f'{CALL}<tool_call>{{"name": "get", "arguments": {{"a', FinishReason.LENGTH, "length"),
    ],
)
def test_the_finish_reason_reflects_calls(text: str, finish: FinishReason, reason: str) -> None:
    whole, _ = parsed(HERMES, [text], finish)

    assert whole.finish_reason == reason


def test_a_piece_keeps_the_order_of_its_parts() -> None:
    form = replace(HERMES, thinking=Thinking.OPENED)
    output = ChatOutput(form, lambda _: "id")
    notes = (TokenWithLogprobs(1, 0, None),)
    text = f"hm</think>a {CALL} b {CALL}c"
    given = OutputPiece(text, (1,), FinishReason.STOP, "c", logprobs=notes, prompt_logprobs=notes)

    first, second, third = output.push(given)

    def calls(index: int) -> tuple[ToolCallDelta, ...]:
        return (ToolCallDelta(index, "id", "get", '{"a": 1}', ended=True),)

    assert first == structs.replace(
        given, delta=Delta("a", "hm", calls(0)), finish_reason=None, stop_reason=None
    )
    assert second == OutputPiece("", delta=Delta(" b", tool_calls=calls(1)))
    assert third == OutputPiece(
        "", (), FinishReason.STOP, "c", delta=Delta("c", finish_reason="tool_calls")
    )


def test_reasoning_can_be_hidden() -> None:
    form = ChatForm(thinking=Thinking.OPENED, include_reasoning=False)
    whole, _ = parsed(form, ["hm", "</think>", "Yes."])

    assert (whole.reasoning, whole.content) == ("", "Yes.")


def test_calls_within_reasoning_are_ignored() -> None:
    whole, _ = parsed(HERMES, [f"<think>{CALL}</think>", "Yes."])

    assert (whole.reasoning, whole.content, whole.calls) == (CALL, "Yes.", [])


def test_text_without_a_format_is_content() -> None:
    assert OutputPiece("a", (1,), FinishReason.STOP).parsed == Delta("a", finish_reason="stop")


def test_ids_differ_and_those_of_mistral_have_nine_letters() -> None:
    ids = {call_id(ToolFormat.HERMES) for _ in range(100)}
    short = call_id(ToolFormat.MISTRAL)

    assert len(ids) == 100
    assert len(short) == 9 and short.isalnum()


HEADS = {
    ToolFormat.HERMES: (CALL, "\n<tool_call>\n"),
    ToolFormat.MISTRAL: ('[TOOL_CALLS][{"name": "get", "arguments": {}}', ', {"name": "get"'),
    ToolFormat.LLAMA3_JSON: ('{"name": "get", "parameters": {}}', '; {"name": "get"'),
    ToolFormat.QWEN3_CODER: (
        "<tool_call>\n<function=get>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=get>",
    ),
    ToolFormat.GLM45: ("<tool_call>get</tool_call>", "\n<tool_call>ge"),
    ToolFormat.KIMI_K2: (
        "<|tool_calls_section_begin|><|tool_call_begin|>get<|tool_call_argument_begin|>{}",
        "<|tool_call_end|><|tool_call_begin|>get",
    ),
}


@pytest.mark.parametrize("form", HEADS)
def test_the_beginning_of_a_further_call_is_omitted(form: ToolFormat) -> None:
    first, head = HEADS[form]
    for pieces in cuttings(first + head, seed=3):
        whole, _ = parsed(ChatForm(form, frozenset({"get"})), pieces, FinishReason.LENGTH)
        assert (whole.content, len(whole.calls)) == ("", 1)
