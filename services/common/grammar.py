"""Grammars in the form that llguidance takes: one rule for who checks them and who applies them."""

from llguidance import LLMatcher, LLParserLimits

from services.core.request import Grammar, GrammarKind

LEXER_STATES_MAX = 20_000
"""Most states of the automaton of one request, of 1 to 2 kB each; usual grammars need hundreds."""


def source_of(grammar: Grammar) -> str:
    """What `LLMatcher` takes, and finds the errors in."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def parser_limits() -> LLParserLimits:
    """What a grammar may cost: the same at the check and where it is applied.

    Errors do not show the grammar or the output, which are nobody else's business.
    """
    return LLParserLimits(max_lexer_states=LEXER_STATES_MAX, verbose_errors=False)
