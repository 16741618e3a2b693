"""Grammars in the form that llguidance takes: one rule for checking and applying them."""

from llguidance import LLMatcher, LLParserLimits

from services.core.request import Grammar, GrammarKind

LEXER_STATES_MAX = 50_000
"""Most states of a compiled grammar's automaton, of about 0.4 KiB; usual ones need hundreds."""


def source_of(grammar: Grammar) -> str:
    """The grammar as `LLMatcher` takes it, which also finds its errors."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def parser_limits() -> LLParserLimits:
    """What a grammar may cost: the same at the check and where it is applied.

    They count work and not time, so that every machine takes the same grammars.

    Errors do not show the grammar or the output, which are nobody else's business.
    """
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=LEXER_STATES_MAX,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
