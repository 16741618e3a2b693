"""Builds Lark grammars of whole outputs: reasoning, then a structured answer, tool calls or text.

A model may have a marker such as <tool_call> as a single token, or write it as plain text.
"""

from collections.abc import Sequence

from llguidance import regex_to_lark

from services.core.request import Grammar, GrammarKind
from services.gateway.structure.schema import check_size, schema_text
from services.gateway.structure.structured_outputs import Structure
from services.gateway.tools import harmony
from services.gateway.tools.format import Thinking
from services.gateway.tools.grammar_text import ANY_TEXT, Rules, Speller, SpellMarker, is_token
from services.gateway.tools.reasoning import THINK, ReasoningMarks
from services.gateway.tools.tool import NO_PARAMETERS, Tool
from services.gateway.vocabulary.errors import BadRequest

PARAM = "tools"


def arguments_schema(tool: Tool) -> Structure:
    """The schema of the arguments of a tool, to be checked.

    Raises:
        BadRequest: if the schema exceeds a limit or is not that of an object.
    """
    schema = NO_PARAMETERS if tool.parameters is None else tool.parameters
    kind = schema.get("type", "object")
    if kind != "object":
        raise BadRequest(
            f"the parameters of the tool \"{tool.name}\" must be a schema of type 'object'",
            param=PARAM,
        )
    text = schema_text({**schema, "type": "object"}, PARAM, lenient=not tool.strict)
    return Structure(Grammar(GrammarKind.JSON_SCHEMA, text), PARAM, f"tool {tool.name}")


def answer_rules(grammar: Grammar) -> Rules:
    """Embed `grammar` in a Lark grammar."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return Rules(f"%json {grammar.text}")
        case GrammarKind.REGEX:
            return Rules(f"/{regex_to_lark(grammar.text, use_ascii='')}/")
        case GrammarKind.LARK:
            return Rules(f"%lark {{\n{grammar.text}\n}}")


def text_before(calls: Rules) -> Rules:
    """Any text with or without `calls` after it; a call must begin with a token of the model."""
    return Rules(f"{ANY_TEXT} ({calls.expression})?", calls.rules)


def output_grammar(
    param: str,
    alternatives: Sequence[Rules],
    thinking: Thinking,
    spell: SpellMarker,
    marks: ReasoningMarks = THINK,
) -> Structure:
    """Grammar of an output: reasoning if `thinking` allows or requires it, then an alternative.

    `marks` are the markers around the reasoning.

    Raises:
        BadRequest: if the grammar is too long.
    """
    lead = Rules(_lead(thinking, spell, marks))
    if thinking is not Thinking.OVER:
        lead = Rules(lead.expression, tuple(_thoughts(spell(marks.closing))))
    return _whole(param, lead, alternatives)


def harmony_grammar(
    param: str,
    answer: Rules | None,
    calls: Rules | None,
    thinking: Thinking,
    spell: SpellMarker,
) -> Structure:
    """Grammar of an output of gpt-oss: reasoning if there is any, then an answer or a call.

    Raises:
        BadRequest: if the grammar is too long.
    """
    speller = Speller(harmony.MARKERS, spell)
    alternatives = [] if calls is None else [calls]
    if answer is not None:
        header = speller.text(harmony.MARKS.closing)
        alternatives.append(Rules(f"{header} ({answer.expression})", answer.rules))
    thoughts = speller.text_until(harmony.END, "thoughts")
    begin = speller.text(f"{harmony.START}assistant")
    reasoning = f"{thoughts.expression} {begin} "
    if thinking is not Thinking.OPENED:
        reasoning = f"({speller.text(harmony.MARKS.opening)} {reasoning})? "
    return _whole(param, Rules(reasoning, thoughts.rules), alternatives)


def _whole(param: str, lead: Rules, alternatives: Sequence[Rules]) -> Structure:
    """Grammar of what `lead` matches, then an alternative."""
    answer = " | ".join(f"answer_{index}" for index in range(len(alternatives)))
    lines = [f"start: {lead.expression}({answer})", *lead.rules]
    for index, part in enumerate(alternatives):
        lines += [f"answer_{index}: {part.expression}", *part.rules]
    text = "\n".join(lines) + "\n"
    check_size(text, param)
    return Structure(Grammar(GrammarKind.LARK, text), param)


def _lead(thinking: Thinking, spell: SpellMarker, marks: ReasoningMarks) -> str:
    match thinking:
        case Thinking.OPENED:
            return "thoughts "
        case Thinking.POSSIBLE:
            return f"({spell(marks.opening)} thoughts)? "
        case Thinking.OVER:
            return ""


def _thoughts(closing: str) -> list[str]:
    """Rules of any text up to the marker `closing`, and the line breaks after it."""
    gap = "gap: /\\n{0,2}/"
    # `ANY_TEXT` matches no special tokens, so it ends at a token. It would match a literal, so
    # that needs a rule that ends at the first match (suffix).
    if is_token(closing):
        return [f"thoughts: {ANY_TEXT} {closing} gap", gap]
    return ["thoughts: unclosed gap", f"unclosed[suffix={closing}]: {ANY_TEXT}", gap]
