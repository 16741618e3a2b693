"""Builds grammars of the calls that a model is forced to write, for each format of calls."""

import json
from collections.abc import Mapping, Sequence

from services.gateway.structure.structured_outputs import lark_literal
from services.gateway.tools import deepseek, harmony, hermes, kimi, mistral, qwen3_coder
from services.gateway.tools.element_grammar import element_rules
from services.gateway.tools.format import ToolFormat, tool_markers
from services.gateway.tools.grammar_text import Rules, Speller, SpellMarker

_ARGUMENTS_KEYS = {ToolFormat.LLAMA3_JSON: "parameters"}
Schemas = Mapping[str, str]
"""The checked schema of the arguments, by name of the tool."""


def call_rules(
    form: ToolFormat,
    schemas: Schemas,
    parallel: bool,
    spell: SpellMarker,
    named: bool,
) -> Rules:
    """Rules of a call of any tool; with `parallel`, of several calls.

    `named`: use Mistral's newer format, in which the name precedes the arguments.

    Raises:
        ValueError: if `form` has no calls.
    """
    speller = Speller(tool_markers(form), spell)
    match form:
        case ToolFormat.HERMES | ToolFormat.LLAMA3_JSON:
            return _objects(form, schemas, parallel, speller)
        case ToolFormat.MISTRAL if named:
            calls = [
                f"{speller.text(mistral.OPEN + name + mistral.ARGUMENTS)} %json {schema}"
                for name, schema in schemas.items()
            ]
            return _any_of(calls, "call+" if parallel else "call")
        case ToolFormat.MISTRAL:
            return _objects(form, schemas, parallel, speller)
        case ToolFormat.HARMONY:
            # A call ends the output.
            return _any_of([_harmony(*tool, speller) for tool in schemas.items()], "call")
        case ToolFormat.NONE:
            raise ValueError("there are no calls without a format")
        case ToolFormat.GLM45 | ToolFormat.QWEN3_CODER:
            return _one_call_sections(form, schemas, parallel, speller)
        case _:
            return _sections(form, schemas, parallel, speller)


def _any_of(calls: Sequence[str], expression: str, rules: Sequence[str] = ()) -> Rules:
    """`expression` of a rule `call`, which is any of `calls`; `rules` are those that they name."""
    named = tuple(f"call_{index}: {call}" for index, call in enumerate(calls))
    alternatives = " | ".join(f"call_{index}" for index in range(len(calls)))
    return Rules(expression, (*named, *rules, f"call: {alternatives}"))


def _objects(form: ToolFormat, schemas: Schemas, parallel: bool, speller: Speller) -> Rules:
    """Calls that are JSON objects with the name and the arguments."""
    key = _ARGUMENTS_KEYS.get(form, "arguments")
    calls = [_object(name, key, schema) for name, schema in schemas.items()]
    match form:
        case ToolFormat.HERMES:
            opening, closing = speller.text(hermes.OPEN), speller.text(hermes.CLOSE)
            marked = f'marked: {opening} "\\n" call "\\n" {closing}'
            return _any_of(calls, 'marked ("\\n" marked)*' if parallel else "marked", [marked])
        case ToolFormat.MISTRAL:
            several = 'call (", " call)*' if parallel else "call"
            return _any_of(calls, f'{speller.text(mistral.OPEN)} "[" {several} "]"')
        case _:
            # Llama 3 was not trained for parallel calls.
            return _any_of(calls, "call")


def _object(name: str, key: str, schema: str) -> str:
    """Rule of the JSON object of a call, with the spaces that models are trained to write."""
    head = f'{{"name": {json.dumps(name)}, "{key}": '
    return f'{lark_literal(head)} %json {schema} "}}"'


def _harmony(name: str, schema: str, speller: Speller) -> str:
    header = f"{harmony.CHANNEL}commentary{harmony.RECIPIENT}{harmony.FUNCTIONS}{name} "
    kind = f"{harmony.CONSTRAIN}json{harmony.MESSAGE}"
    return f"{speller.text(header + kind)} %json {schema}"


def _one_call_sections(
    form: ToolFormat, schemas: Schemas, parallel: bool, speller: Speller
) -> Rules:
    """Calls with elements, each between the markers of Hermes."""
    qwen = form is ToolFormat.QWEN3_CODER
    calls, rules = list[str](), list[str]()
    for index, (name, schema) in enumerate(schemas.items()):
        if qwen:
            head = speller.text(f"{hermes.OPEN}\n{qwen3_coder.FUNCTION}{name}>\n")
            tail = speller.text(f"</function>\n{hermes.CLOSE}")
        else:
            # GLM 4.5 writes a line break after each tag, GLM 4.7 none.
            head = f'{speller.text(hermes.OPEN + name)} "\\n"?'
            tail = speller.text(hermes.CLOSE)
        elements = element_rules(form, index, json.loads(schema), speller)
        calls.append(" ".join((head, elements.expression, tail)))
        rules += elements.rules
    return _any_of(calls, 'call ("\\n"? call)*' if parallel else "call", rules)


def _sections(form: ToolFormat, schemas: Schemas, parallel: bool, speller: Speller) -> Rules:
    """All calls in a single section."""
    calls, rules = list[str](), list[str]()
    for index, (name, schema) in enumerate(schemas.items()):
        call = _section_call(form, index, name, schema, speller)
        calls.append(call.expression)
        rules += call.rules
    match form:
        case ToolFormat.DEEPSEEK_V3 | ToolFormat.DEEPSEEK_V31:
            begin, end = deepseek.SECTION, deepseek.SECTION_END
        case ToolFormat.KIMI_K2:
            begin, end = kimi.SECTION, kimi.SECTION_END
        case _:
            section = _dsml_section(form)
            begin, end = f"{deepseek.opening(section)}\n", f"</{deepseek.DSML}{section}>"
    several = 'call ("\\n"? call)*' if parallel else "call"
    return _any_of(calls, f"{speller.text(begin)} {several} {speller.text(end)}", rules)


def _dsml_section(form: ToolFormat) -> str:
    v4 = form is ToolFormat.DEEPSEEK_V4
    return deepseek.V4_SECTION if v4 else deepseek.V32_SECTION


def _section_call(form: ToolFormat, index: int, name: str, schema: str, speller: Speller) -> Rules:
    """A call in a section."""
    match form:
        case ToolFormat.DEEPSEEK_V3:
            head = f"{deepseek.CALL}function{deepseek.SEPARATOR}{name}\n{deepseek.JSON}\n"
            tail = f"\n{deepseek.JSON_END}{deepseek.CALL_END}"
        case ToolFormat.DEEPSEEK_V31:
            head, tail = f"{deepseek.CALL}{name}{deepseek.SEPARATOR}", deepseek.CALL_END
        case ToolFormat.KIMI_K2:
            called = speller.text(f"{kimi.CALL}{kimi.NAMESPACE}{name}:")
            arguments, end = speller.text(kimi.ARGUMENTS), speller.text(kimi.CALL_END)
            return Rules(f"{called} /[0-9]{{1,4}}/ {arguments} %json {schema} {end}")
        case _:
            elements = element_rules(form, index, json.loads(schema), speller)
            opening = speller.text(f'<{deepseek.DSML}invoke name="{name}">\n')
            closing = speller.text(f"</{deepseek.DSML}invoke>\n")
            return Rules(f"{opening} {elements.expression} {closing}", elements.rules)
    return Rules(f"{speller.text(head)} %json {schema} {speller.text(tail)}")
