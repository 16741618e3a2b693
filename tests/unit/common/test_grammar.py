"""Grammars are converted for llguidance."""

import pytest
from llguidance import LLMatcher

from services.common.grammar import parser_limits, source_of
from services.core.request import Grammar, GrammarKind


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        Grammar(GrammarKind.REGEX, "(a+)+$"),
        Grammar(GrammarKind.LARK, 'start: "a" | "b" start'),
    ],
)
def test_each_kind_is_accepted(grammar: Grammar) -> None:
    error = LLMatcher.validate_grammar(source_of(grammar), limits=parser_limits())

    assert error == ""


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "str"}'),
        Grammar(GrammarKind.JSON_SCHEMA, "{"),
        Grammar(GrammarKind.REGEX, "(a"),
        Grammar(GrammarKind.LARK, "start: b"),
    ],
)
def test_invalid_grammars_have_the_error_of_the_matcher(grammar: Grammar) -> None:
    assert LLMatcher.validate_grammar(source_of(grammar), limits=parser_limits())
