"""In every format, streamed arguments and reasoning equal those of the whole output."""

import itertools
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from services.core.request import FinishReason
from services.gateway.serving.chat_output import ChatOutput
from services.gateway.serving.output import Output, OutputPiece
from services.gateway.tools.argument_types import argument_types
from services.gateway.tools.event import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from services.gateway.tools.format import (
    ChatForm,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    tool_parser,
)
from tests.support.call_texts import CALL_FORMATS, TAGS, written
from tests.support.cuttings import cuttings, parsed

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "share": {"type": "number"},
        "wanted": {"type": "boolean"},
        "places": {"type": "array"},
        "options": {"$ref": "#/$defs/options"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"options": {"type": "object"}},
}
TYPES = {"get": argument_types(PARAMETERS), "now": argument_types(None)}
NAMES = frozenset(TYPES)
TEXTS = ("Paris", 'a "b" \\ c', "zwei\nZeilen\n", " \n x", "<b>é</b> 😀", "7", "true", "")


def two_way(text: str) -> Iterator[list[str]]:
    """All ways to split the text in two."""
    return ([text[:at], text[at:]] for at in range(1, len(text)))


def random_calls(rng: Random) -> list[tuple[str, dict[str, Any]]]:
    """Calls that fit the parameters."""
    values: dict[str, list[Any]] = {
        "city": list(TEXTS),
        "days": [0, 7, -12],
        "share": [0.5, 2, 1e-7],
        "wanted": [True, False],
        "places": [[], ["a", {"b": "</c>\n"}], [[1, None]]],
        "options": [{}, {"a": {"b": "x\ty"}, "c": [1.5, True]}],
        "note": ["free", None],
    }
    calls: list[tuple[str, dict[str, Any]]] = []
    for _ in range(rng.randrange(1, 4)):
        keys = rng.sample(sorted(values), rng.randrange(len(values) + 1))
        arguments = {key: rng.choice(values[key]) for key in keys}
        calls.append(rng.choice([("get", arguments), ("now", {})]))
    return calls


def events_of(form: ToolFormat, pieces: list[str]) -> list[Event]:
    """The parser events for the pieces."""
    parser = tool_parser(form, NAMES, TYPES)
    assert parser is not None
    return parsed(parser, pieces)


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    """Names and arguments of the complete calls."""
    names = {event.index: event.name for event in events if isinstance(event, CallBegin)}
    texts = {event.index: event.text for event in events if isinstance(event, CallArguments)}
    ended = [event.index for event in events if isinstance(event, CallEnd) and event.complete]
    return [(names[index], json.loads(texts[index])) for index in ended]


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("seed", range(15))
def test_calls_parse_with_any_chunking(form: ToolFormat, seed: int) -> None:
    rng = Random(f"{form} {seed}")
    calls = random_calls(rng)
    # Llama's calls are all of the output, and in harmony messages do not mix with text.
    alone = form in (ToolFormat.HARMONY, ToolFormat.LLAMA3_JSON)
    lead = "" if alone else rng.choice(["", "Well:\n\n"])
    output = lead + written(form, calls)

    whole = events_of(form, [output])

    assert calls_of(whole) == calls
    assert [event for event in whole if isinstance(event, Content)] == (
        [Content("Well:")] if lead else []
    )
    for pieces in (*two_way(output), *cuttings(output, seed, count=30)):
        assert events_of(form, pieces) == whole


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("seed", range(8))
def test_truncated_output_is_parsed_to_its_end(form: ToolFormat, seed: int) -> None:
    rng = Random(f"{form} {seed}")
    output = written(form, random_calls(rng))
    complete = calls_of(events_of(form, [output]))

    for end in range(len(output)):
        prefix = output[:end]
        events = events_of(form, [prefix])
        assert calls_of(events) == complete[: len(calls_of(events))]
        for pieces in cuttings(prefix, seed, count=3):
            assert events_of(form, pieces) == events


@pytest.mark.parametrize("form", CALL_FORMATS)
@pytest.mark.parametrize("seed", range(60))
def test_malformed_output_loses_no_text(form: ToolFormat, seed: int) -> None:
    rng = Random(f"{form} {seed}")
    count = itertools.count()
    parts = []
    for _ in range(rng.randrange(1, 16)):
        parts.append(rng.choice(TAGS[form]) if rng.random() < 0.7 else f" word{next(count)}_ ")
        parts.append(rng.choice(["", "", "\n", " ", "<", "é"]))
    output = "".join(parts) + "\nend."

    whole = events_of(form, [output])

    kinds = (Content, CallArguments, Reasoning)
    texts = [event.text for event in whole if isinstance(event, kinds)]
    kept = re.findall(r"word\d+_", " ".join(texts))
    assert kept == [f"word{number}_" for number in range(next(count))]
    for pieces in (*two_way(output), *cuttings(output, seed, count=10)):
        assert events_of(form, pieces) == whole


REASONING = {
    ReasoningFormat.QWEN3: ("<think>", "</think>"),
    ReasoningFormat.MISTRAL: ("[THINK]", "[/THINK]"),
}


# Harmony has reasoning of its own; see test_harmony.py.
@pytest.mark.parametrize("form", sorted(set(CALL_FORMATS) - {ToolFormat.HARMONY}))
@pytest.mark.parametrize("reasoning", REASONING)
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_reasoning_and_calls_are_parsed_together(
    form: ToolFormat, reasoning: ReasoningFormat, opened: bool, seed: int
) -> None:
    rng = Random(f"{form} {reasoning} {opened} {seed}")
    opening, closing = REASONING[reasoning]
    calls = random_calls(rng)
    output = f"{'' if opened else opening}\na < b, [/ so\n{closing}\n\n{written(form, calls)}"
    thinking = Thinking.OPENED if opened else Thinking.POSSIBLE
    chat = ChatForm(form, NAMES, thinking, types=TYPES, marks=reasoning.marks)

    whole = parsed_answer(chat, [output])

    assert whole[:2] == ("", "a < b, [/ so")
    assert [(name, json.loads(text)) for _, name, text in whole[2]] == calls
    for pieces in (*two_way(output), *cuttings(output, seed)):
        assert parsed_answer(chat, pieces) == whole


def parsed_answer(chat: ChatForm, pieces: list[str]) -> tuple[str, str, list[tuple[str, str, str]]]:
    """Content, reasoning and calls of a choice."""
    ids = itertools.count()
    output, total = ChatOutput(chat, lambda _: f"id{next(ids)}"), Output()
    for text in pieces:
        for piece in output.push(OutputPiece(text)):
            total.add(piece)
    for piece in output.push(OutputPiece("", finish_reason=FinishReason.STOP)):
        total.add(piece)
    calls = [(call.id, call.name, call.arguments) for call in total.parsed.calls]
    return total.parsed.content, total.parsed.reasoning, calls


@pytest.mark.parametrize(
    "form", [ToolFormat.KIMI_K2, ToolFormat.DEEPSEEK_V31, ToolFormat.DEEPSEEK_V4]
)
def test_a_call_ends_the_reasoning_of_models_that_do_not_close_it(form: ToolFormat) -> None:
    output = f"<think>hm\n{written(form, [('now', {})])}"

    for names, calls in ((NAMES, 1), (frozenset[str](), 0)):
        chat = ChatForm(form, names, Thinking.POSSIBLE)
        for pieces in ([output], *two_way(output)):
            content, reasoning, parsed_calls = parsed_answer(chat, pieces)
            assert (content, len(parsed_calls)) == ("", calls)
            assert (reasoning == "hm") == (calls == 1)


def test_the_ids_of_kimi_are_kept_unless_they_repeat() -> None:
    call = "<|tool_call_begin|>functions.now:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
    output = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"

    _, _, calls = parsed_answer(ChatForm(ToolFormat.KIMI_K2, NAMES), [output])

    assert [call_id for call_id, _, _ in calls] == ["functions.now:3", "id0"]


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_strings_are_sent_while_they_are_written(form: ToolFormat) -> None:
    output = written(form, [("get", {"city": "ab" * 20})])
    parser = tool_parser(form, NAMES, TYPES)
    assert parser is not None
    begun = output.index("abab")

    parser.push(output[: begun + 4])
    events = parser.push(output[begun + 4 : begun + 10])

    assert events == [CallArguments(0, "ababab")]


@pytest.mark.parametrize(
    ("form", "output", "arguments"),
    [
        # Values whose text does not fit the schema, and arguments that the schema does not name.
        (
            ToolFormat.QWEN3_CODER,
            "<tool_call><function=get><parameter=days>many</parameter>"
            "<parameter=wanted>True</parameter><parameter=note>None</parameter>"
            "<parameter=other>[1]</parameter></function></tool_call>",
            {"days": "many", "wanted": True, "note": "None", "other": [1]},
        ),
        (
            ToolFormat.QWEN3_CODER,
            "<tool_call>\n<function=get>\n<parameter=city>\n\nx\n\n</parameter>\n"
            "<parameter=days> 007 </parameter></function>\n</tool_call>",
            {"city": "\nx\n", "days": " 007 "},
        ),
        (
            ToolFormat.GLM45,
            "<tool_call>get<arg_key>city</arg_key><arg_value>7</arg_value>"
            "<arg_key>days</arg_key><arg_value>7</arg_value></tool_call>",
            {"city": "7", "days": 7},
        ),
        # The tag says that it is a string.
        (
            ToolFormat.DEEPSEEK_V4,
            '<｜DSML｜tool_calls><｜DSML｜invoke name="get">'
            '<｜DSML｜parameter name="days" string="true">7</｜DSML｜parameter>'
            '<｜DSML｜parameter name="wanted" string="false">null</｜DSML｜parameter>'
            "</｜DSML｜invoke></｜DSML｜tool_calls>",
            {"days": "7", "wanted": None},
        ),
        (
            ToolFormat.KIMI_K2,
            "<|tool_calls_section_begin|> <|tool_call_begin|> get "
            '<|tool_call_argument_begin|> {"a": 1} <|tool_call_end|>',
            {"a": 1},
        ),
    ],
)
def test_documented_deviations(form: ToolFormat, output: str, arguments: dict[str, Any]) -> None:
    for pieces in cuttings(output, seed=5):
        assert calls_of(events_of(form, pieces)) == [("get", arguments)]


@pytest.mark.parametrize(
    ("form", "output"),
    [
        (ToolFormat.QWEN3_CODER, "a <tool_call>\n<function=unknown>\n<parameter=a>"),
        (ToolFormat.QWEN3_CODER, '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'),
        (ToolFormat.QWEN3_CODER, "<tool_call>\n<function=get>"),
        (ToolFormat.QWEN3_CODER, f"<tool_call><function={'x' * 300}>"),
        (ToolFormat.GLM45, "<tool_call>get\nno call</tool_call>"),
        (ToolFormat.GLM45, "<tool_call></tool_call>"),
        (ToolFormat.DEEPSEEK_V32, "<｜DSML｜tool_calls>"),
        (ToolFormat.DEEPSEEK_V31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>no<｜tool▁sep｜>{}"),
        (ToolFormat.KIMI_K2, "<|tool_calls_section_begin|><|tool_call_begin|>functions.no:0"),
    ],
)
def test_text_without_a_call_is_content(form: ToolFormat, output: str) -> None:
    for pieces in cuttings(output, seed=6):
        assert events_of(form, pieces) == [Content(output)]
