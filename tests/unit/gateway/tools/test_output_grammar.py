"""All output that a call grammar allows is parsed by the parser of the same format."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.common.grammar import parser_limits, source_of
from services.core.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind
from services.gateway.structure.check_process import byte_tokenizer
from services.gateway.structure.schema import schema_text
from services.gateway.structure.structured_outputs import Structure, lark_literal
from services.gateway.tools import mistral, reasoning
from services.gateway.tools.argument_types import argument_types
from services.gateway.tools.call_grammar import call_rules
from services.gateway.tools.event import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from services.gateway.tools.format import (
    ELEMENT_FORMATS,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    reasoning_markers,
    tool_markers,
    tool_parser,
)
from services.gateway.tools.harmony import HarmonyParser
from services.gateway.tools.output_grammar import (
    answer_rules,
    arguments_schema,
    harmony_grammar,
    output_grammar,
    text_before,
)
from services.gateway.tools.tool import Tool
from services.gateway.vocabulary.errors import BadRequest
from tests.support.call_texts import CALL_FORMATS
from tests.support.cuttings import parsed

EOS = 1000
MARKERS = sorted({marker for form in CALL_FORMATS for marker in tool_markers(form)})
# Whole tags of DSML are no tokens, but a part of them is.
TOKENS = [marker for marker in MARKERS if "DSML｜f" not in marker and "DSML｜t" not in marker]
SPECIAL = dict(enumerate([*TOKENS, "<think>", "</think>", "[THINK]", "[/THINK]"], start=300))
IDS = {name: index for index, name in SPECIAL.items()}
TOKENIZER: LLTokenizer = byte_tokenizer(1000, SPECIAL)

WEATHER = Tool(
    "get_weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 5},
            "days": {"type": "integer", "minimum": 0, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
            "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
        },
        "$defs": {"part": {"type": "boolean"}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
)
NOW = Tool("now")
FORMS = CALL_FORMATS
ANSWER = Grammar(
    GrammarKind.JSON_SCHEMA, schema_text({"type": "integer", "minimum": 0, "maximum": 99}, "p")
)


def schemas(*tools: Tool) -> dict[str, str]:
    """The schemas of the arguments, by the tools' names."""
    return {tool.name: arguments_schema(tool).grammar.text for tool in tools}


def as_token(name: str) -> str:
    """The marker as a token, if it is one."""
    return f"<[{IDS[name]}]>" if name in IDS else lark_literal(name)


def token_ids(text: str) -> list[int]:
    """Tokens of a text, with markers as special tokens."""
    for index, name in SPECIAL.items():
        if name in text:
            before, _, after = text.partition(name)
            return [*token_ids(before), index, *token_ids(after)]
    return [token for char in text for token in TOKENIZER.tokenize_str(char)]


def plain_ids(text: str) -> list[int]:
    """Tokens of a text, without special ones."""
    return [token for char in text for token in TOKENIZER.tokenize_str(char)]


def follows(structure: Structure, ids: list[int]) -> bool:
    """Whether all of `ids` is an output of the grammar."""
    matcher = LLMatcher(TOKENIZER, source_of(structure.grammar), limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# What ends a string in an element, which random tokens would hardly ever make.
ENDINGS = ("\n</parameter>", "</arg_value>", "</｜DSML｜parameter>")


def random_output(
    structure: Structure, seed: int, to_ids: Callable[[str], list[int]] | None = None
) -> str:
    """An output that the grammar allows; `to_ids` encodes markers."""
    rng = Random(seed)
    matcher = LLMatcher(TOKENIZER, source_of(structure.grammar), limits=parser_limits())
    assert not matcher.is_error(), matcher.get_error()
    endings = list(map(to_ids or token_ids, ENDINGS))
    output = b""
    for _ in range(2000):
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(EOS + 1) if mask[i // 8] >> (i % 8) & 1]
        token = rng.choice(allowed)
        if token == EOS:
            return output.decode(errors="replace")
        ids = [token]
        if rng.random() < 0.2 and (ending := rng.choice(endings))[0] in allowed:
            ids = ending
        for taken in ids[: matcher.try_consume_tokens(ids)]:
            name = SPECIAL.get(taken)
            output += name.encode() if name else TOKENIZER.decode_bytes([taken])
    raise AssertionError("the output does not end")


def calls_in(events: list[Event]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls; there must be no other events."""
    assert not events or isinstance(events[-1], CallEnd)
    names = [event.name for event in events if isinstance(event, CallBegin)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, CallArguments)]
    assert len(events) == 3 * len(names) == 3 * len(arguments)
    return list(zip(names, arguments, strict=True))


@pytest.mark.parametrize("mark", [as_token, lark_literal], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("form", "named"), [*((form, False) for form in FORMS), (ToolFormat.MISTRAL, True)]
)
@pytest.mark.parametrize("seed", range(6))
def test_the_parser_reads_all_grammatical_output(
    form: ToolFormat, named: bool, mark: Callable[[str], str], seed: int
) -> None:
    tools = [WEATHER, NOW]
    rules = call_rules(form, schemas(*tools), parallel=True, spell=mark, named=named)
    structure = output_grammar("tools", [rules], Thinking.OVER, mark)

    output = random_output(structure, seed, token_ids if mark is as_token else plain_ids)

    types = {tool.name: argument_types(tool.parameters) for tool in tools}
    parser = tool_parser(form, types, types)
    assert parser is not None
    calls = calls_in(parsed(parser, [output]))
    assert calls
    for name, arguments in calls:
        if name == "now":
            assert arguments == {}
        else:
            assert {"city", "unit"} <= arguments.keys() <= {"city", "unit", "days", "parts"}
            assert arguments["unit"] in "CF" and arguments.get("days", 0) in range(10)
            assert isinstance(arguments["city"], str)
            # Elements hold strings without quotes, whose length is not enforced.
            assert form in ELEMENT_FORMATS or len(arguments["city"]) <= 5
            assert set(arguments.get("parts", [])) <= {True, False}


@pytest.mark.parametrize("thinking", [Thinking.OPENED, Thinking.POSSIBLE])
@pytest.mark.parametrize("seed", range(8))
def test_harmony_may_reason_before_an_answer_or_a_call(thinking: Thinking, seed: int) -> None:
    calls = call_rules(
        ToolFormat.HARMONY, schemas(NOW), parallel=False, spell=as_token, named=False
    )
    answer = answer_rules(Grammar(GrammarKind.REGEX, "4[0-9]"))

    output = random_output(harmony_grammar("p", answer, calls, thinking, as_token), seed)

    parser = HarmonyParser({"now"}, thinking is Thinking.OPENED)
    events = [event for event in parsed(parser, [output]) if not isinstance(event, Reasoning)]
    if isinstance(events[0], Content):
        assert events in [[Content(f"4{digit}")] for digit in range(10)]
    else:
        assert calls_in(events) == [("now", {})]


def test_harmony_markers_may_be_plain_text() -> None:
    answer = answer_rules(Grammar(GrammarKind.REGEX, "4[0-9]"))
    opened = harmony_grammar("p", answer, None, Thinking.OPENED, lark_literal)
    final = "<|channel|>final<|message|>42"

    assert follows(opened, plain_ids(f"hm <|en<|end|><|start|>assistant{final}"))
    assert not follows(opened, plain_ids(final))


@pytest.mark.parametrize("form", FORMS)
def test_a_single_call_is_allowed_without_parallel_calls(form: ToolFormat) -> None:
    rules = call_rules(form, schemas(NOW), parallel=False, spell=lark_literal, named=False)
    structure = output_grammar("tools", [rules], Thinking.OVER, lark_literal)

    for seed in range(5):
        parser = tool_parser(form, {"now"})
        assert parser is not None
        assert calls_in(parsed(parser, [random_output(structure, seed)])) == [("now", {})]


def test_reasoning_may_come_before_the_answer() -> None:
    possible = output_grammar("p", [answer_rules(ANSWER)], Thinking.POSSIBLE, as_token)
    opened = output_grammar("p", [answer_rules(ANSWER)], Thinking.OPENED, as_token)

    assert follows(possible, token_ids("7"))
    assert follows(possible, token_ids("<think>\nhm 7 {\n</think>\n\n7"))
    assert not follows(possible, token_ids("hm</think>7"))
    assert follows(opened, token_ids("hm 7\n</think>\n\n42"))
    assert not follows(opened, token_ids("hm 7\n</think>\n\nhm"))
    assert not follows(opened, token_ids("7"))


def test_reasoning_may_use_mistral_markers() -> None:
    opened = output_grammar(
        "p", [answer_rules(ANSWER)], Thinking.OPENED, as_token, reasoning.MISTRAL_THINK
    )

    assert follows(opened, token_ids("hm < think>[/THINK]42"))
    assert not follows(opened, token_ids("hm</think>42"))


def test_reasoning_markers_may_be_text() -> None:
    possible = output_grammar("p", [answer_rules(ANSWER)], Thinking.POSSIBLE, lark_literal)

    assert follows(possible, plain_ids("<think>hm < 7</think>\n\n7"))
    assert follows(possible, plain_ids("7"))
    assert not follows(possible, plain_ids("<think>hm</think>hm"))


def test_grammar_allows_an_answer_or_calls() -> None:
    calls = call_rules(ToolFormat.HERMES, schemas(NOW), parallel=True, spell=as_token, named=False)
    either = output_grammar("p", [answer_rules(ANSWER), calls], Thinking.OVER, as_token)

    assert follows(either, token_ids("12"))
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert follows(either, token_ids(f"{call}\n{call}"))
    assert not follows(either, token_ids(f"12\n{call}"))


def test_grammar_allows_text_before_strict_calls() -> None:
    calls = call_rules(
        ToolFormat.HERMES, schemas(WEATHER), parallel=True, spell=as_token, named=False
    )
    structure = output_grammar("p", [text_before(calls)], Thinking.OVER, as_token)

    assert follows(structure, token_ids("any { text\n"))
    head = 'Well.\n<tool_call>\n{"name": "get_weather", "arguments": '
    assert follows(structure, token_ids(f'{head}{{"city":"a", "unit": "C"}}}}\n</tool_call>'))
    assert not follows(structure, token_ids(f'{head}{{"city":"a"}}}}\n</tool_call>'))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar(GrammarKind.REGEX, "^a/[b}]+$"), "a/b}", "a"),
        (Grammar(GrammarKind.LARK, 'start: "x" y\ny: "}" | /[{]+/'), "x{{", "x}}"),
    ],
)
def test_the_answer_may_be_any_grammar(grammar: Grammar, good: str, bad: str) -> None:
    structure = output_grammar("p", [answer_rules(grammar)], Thinking.POSSIBLE, as_token)

    assert follows(structure, token_ids(good))
    assert follows(structure, token_ids(f"<think></think>{good}"))
    assert not follows(structure, token_ids(bad))


PLAIN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "parameters",
    [
        PLAIN,
        {"$ref": "#/$defs/X", "$defs": {"X": PLAIN}},
        {"$ref": "#/definitions/X", "definitions": {"X": PLAIN}, "$schema": "s", "type": "object"},
        {"allOf": [{"$ref": "#/$defs/X"}], "$defs": {"X": PLAIN}},
    ],
)
def test_arguments_have_the_properties_of_the_schema_only(parameters: dict[str, Any]) -> None:
    text = arguments_schema(Tool("t", parameters=parameters)).grammar.text
    assert text.count('"additionalProperties":false') == 1
    assert '"a":{"type":"integer"}},"additionalProperties":false' in text


@pytest.mark.parametrize(
    "tool",
    [
        Tool("t", parameters={"type": "array"}),
        Tool("t", parameters={"type": "object", "description": "x" * GRAMMAR_BYTES_MAX}),
        Tool("t", parameters={"$ref": "https://example.org"}),
    ],
)
def test_unenforceable_schemas_are_refused(tool: Tool) -> None:
    with pytest.raises(BadRequest) as caught:
        arguments_schema(tool)

    assert caught.value.param == "tools"


def test_tools_that_are_too_long_together_are_refused() -> None:
    schema = {"type": "object", "description": "x" * (GRAMMAR_BYTES_MAX // 2)}
    tools = [Tool(f"t{n}", parameters=schema) for n in range(3)]
    rules = call_rules(
        ToolFormat.HERMES, schemas(*tools), parallel=True, spell=lark_literal, named=False
    )

    with pytest.raises(BadRequest, match="shorten"):
        output_grammar("tools", [rules], Thinking.OVER, lark_literal)


def test_marker_tokens_are_found_in_the_vocabulary() -> None:
    assert set(tool_markers(ToolFormat.MISTRAL)) >= {mistral.OPEN, mistral.ARGUMENTS}
    assert {reasoning.OPEN, reasoning.CLOSE} == set(reasoning_markers(ReasoningFormat.QWEN3))
