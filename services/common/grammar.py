"""Converts grammars to llguidance's form, and defines limits for their check and their use."""

from llguidance import LLMatcher, LLParserLimits

from services.core.request import Grammar, GrammarKind

LEXER_STATES_MAX = 50_000
"""Maximum states of a compiled grammar's automaton, about 0.4 KiB each; hundreds are typical."""


def source_of(grammar: Grammar) -> str:
    """The grammar in the form that `LLMatcher` accepts; it is checked only there."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def parser_limits() -> LLParserLimits:
    """Limits on a grammar, for the gateway's check and for its use in the engine.

    They limit work rather than time, so that all machines accept the same grammars. Errors contain
    neither grammar nor output, since those may be confidential.
    """
    # Fuel and state counts are deterministic, unlike time limits.
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=LEXER_STATES_MAX,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
