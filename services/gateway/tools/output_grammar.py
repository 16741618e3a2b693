"""Builds Lark grammars of whole outputs: reasoning, then a structured answer, tool calls or text.

A model may have a marker such as <tool_call> as a single token, or write it as plain text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from llguidance import regex_to_lark

from services.core.request import Grammar, GrammarKind
from services.gateway.structure.schema import check_size, schema_text
from services.gateway.structure.structured_outputs import Structure, lark_literal
from services.gateway.tools import hermes, mistral, reasoning
from services.gateway.tools.format import Thinking, ToolFormat
from services.gateway.tools.tool import NO_PARAMETERS, Tool
from services.gateway.vocabulary.errors import BadRequest

PARAM = "tools"
_ARGUMENTS_KEYS = {ToolFormat.LLAMA3_JSON: "parameters"}

SpellMarker = Callable[[str], str]
"""Spells a marker in a grammar: as a literal, or as a token of the model."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Part of a Lark grammar: an expression, and the rules that the expression names."""

    expression: str
    rules: tuple[str, ...] = ()


def call_rules(
    form: ToolFormat,
    schemas: Mapping[str, str],
    parallel: bool,
    spell: SpellMarker,
    named: bool,
) -> Rules:
    """Rules of a call of any tool; with `parallel`, of several calls.

    `schemas`: the checked schema of the arguments, by name of the tool. `named`: use Mistral's
    newer format, in which the name precedes the arguments.

    Raises:
        ValueError: if `form` has no calls.
    """
    if form is ToolFormat.MISTRAL and named:
        return _mistral_named(schemas, parallel, spell)
    key = _ARGUMENTS_KEYS.get(form, "arguments")
    rules = tuple(
        f"call_{index}: {_object(name, key, schema)}"
        for index, (name, schema) in enumerate(schemas.items())
    )
    alternatives = " | ".join(f"call_{index}" for index in range(len(schemas)))
    rules += (f"call: {alternatives}",)
    match form:
        case ToolFormat.HERMES:
            rules += (f'marked: {spell(hermes.OPEN)} "\\n" call "\\n" {spell(hermes.CLOSE)}',)
            return Rules('marked ("\\n" marked)*' if parallel else "marked", rules)
        case ToolFormat.MISTRAL:
            calls = 'call (", " call)*' if parallel else "call"
            return Rules(f'{spell(mistral.OPEN)} "[" {calls} "]"', rules)
        case ToolFormat.LLAMA3_JSON:
            # Llama 3 was not trained for parallel calls.
            return Rules("call", rules)
        case ToolFormat.NONE:
            raise ValueError("there are no calls without a format")


def _mistral_named(schemas: Mapping[str, str], parallel: bool, spell: SpellMarker) -> Rules:
    rules = tuple(
        f"call_{index}: {spell(mistral.OPEN)} {lark_literal(name)}"
        f" {spell(mistral.ARGUMENTS)} %json {schema}"
        for index, (name, schema) in enumerate(schemas.items())
    )
    alternatives = " | ".join(f"call_{index}" for index in range(len(schemas)))
    return Rules("call+" if parallel else "call", (*rules, f"call: {alternatives}"))


def _object(name: str, key: str, schema: str) -> str:
    """Rule of the JSON object of a call, with the spaces that models are trained to write."""
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{lark_literal(head)} %json {schema} "}}"'


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


_ANY_TEXT = "/(?s:.*)/"


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
    return Rules(f"{_ANY_TEXT} ({calls.expression})?", calls.rules)


def output_grammar(
    param: str, alternatives: Sequence[Rules], thinking: Thinking, spell: SpellMarker
) -> Structure:
    """Grammar of an output: reasoning if `thinking` allows or requires it, then an alternative.

    Raises:
        BadRequest: if the grammar is too long.
    """
    answer = " | ".join(f"answer_{index}" for index in range(len(alternatives)))
    lines = [f"start: {_lead(thinking, spell)}({answer})"]
    for index, part in enumerate(alternatives):
        lines += [f"answer_{index}: {part.expression}", *part.rules]
    if thinking is not Thinking.OVER:
        lines += _thoughts(spell(reasoning.CLOSE))
    text = "\n".join(lines) + "\n"
    check_size(text, param)
    return Structure(Grammar(GrammarKind.LARK, text), param)


def _lead(thinking: Thinking, spell: SpellMarker) -> str:
    match thinking:
        case Thinking.OPENED:
            return "thoughts "
        case Thinking.POSSIBLE:
            return f"({spell(reasoning.OPEN)} thoughts)? "
        case Thinking.OVER:
            return ""


def _thoughts(closing: str) -> list[str]:
    """Rules of any text up to the marker `closing`, and the line breaks after it."""
    gap = "gap: /\\n{0,2}/"
    # `_ANY_TEXT` matches no special tokens, so it ends at a token. It would match a literal, so
    # that needs a rule that ends at the first match (suffix).
    if is_token(closing):
        return [f"thoughts: {_ANY_TEXT} {closing} gap", gap]
    return ["thoughts: unclosed gap", f"unclosed[suffix={closing}]: {_ANY_TEXT}", gap]


def is_token(spelling: str) -> bool:
    """Return whether a marker, as spelled in a grammar, is a token rather than a literal."""
    return not spelling.startswith('"')
