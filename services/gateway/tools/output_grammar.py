"""Grammars of whole outputs: reasoning, then an answer of some form, calls of tools, or text."""

from collections.abc import Sequence

from llguidance import regex_to_lark

from services.core.request import Grammar, GrammarKind
from services.gateway.structure.asked import Structure
from services.gateway.structure.schema import check_size
from services.gateway.tools import reasoning
from services.gateway.tools.call_grammar import Mark, Rules
from services.gateway.tools.format import Thinking

_ANY_TEXT = "/(?s:.*)/"


def answer_rules(grammar: Grammar) -> Rules:
    """A grammar as a part of another one."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return Rules(f"%json {grammar.text}")
        case GrammarKind.REGEX:
            return Rules(f"/{regex_to_lark(grammar.text, use_ascii='')}/")
        case GrammarKind.LARK:
            return Rules(f"%lark {{\n{grammar.text}\n}}")


def text_before(calls: Rules) -> Rules:
    """Any text, with or without calls after it, which must begin with a token of the model."""
    return Rules(f"{_ANY_TEXT} ({calls.expression})?", calls.rules)


def output_grammar(
    param: str, alternatives: Sequence[Rules], thinking: Thinking, mark: Mark
) -> Structure:
    """One of `alternatives`, after reasoning if there may or must be some.

    Raises:
        BadRequest: if that makes a grammar that is too long.
    """
    answer = " | ".join(f"answer_{index}" for index in range(len(alternatives)))
    lines = [f"start: {_lead(thinking, mark)}({answer})"]
    for index, part in enumerate(alternatives):
        lines += [f"answer_{index}: {part.expression}", *part.rules]
    if thinking is not Thinking.OVER:
        lines += _thoughts(mark(reasoning.CLOSE))
    text = "\n".join(lines) + "\n"
    check_size(text, param)
    return Structure(Grammar(GrammarKind.LARK, text), param)


def _lead(thinking: Thinking, mark: Mark) -> str:
    match thinking:
        case Thinking.OPENED:
            return "thoughts "
        case Thinking.POSSIBLE:
            return f"({mark(reasoning.OPEN)} thoughts)? "
        case Thinking.OVER:
            return ""


def _thoughts(closing: str) -> list[str]:
    """Any text up to the mark `closing`, and the line breaks after it."""
    gap = "gap: /\\n{0,2}/"
    if is_token(closing):
        return [f"thoughts: {_ANY_TEXT} {closing} gap", gap]
    return ["thoughts: unclosed gap", f"unclosed[suffix={closing}]: {_ANY_TEXT}", gap]


def is_token(mark: str) -> bool:
    """Whether a mark of a grammar is a token and no literal."""
    return not mark.startswith('"')
