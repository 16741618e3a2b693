"""Builds grammars of arguments that are elements, such as `<parameter=city>Paris</parameter>`.

Elements hold strings without quotes, so a string cannot be constrained by JSON's grammar: `enum`
and `const` of strings are enforced, other keywords of strings are not.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.structure.schema import compact_json
from services.gateway.structure.structured_outputs import lark_literal
from services.gateway.tools import deepseek, glm, qwen3_coder
from services.gateway.tools.argument_types import ONLY_STRING, argument_types
from services.gateway.tools.format import ToolFormat
from services.gateway.tools.grammar_text import Rules, Speller
from services.gateway.tools.tool import Tool

# Keywords of a schema to which an argument's own schema may refer.
_SHARED = ("$defs", "definitions", "x-guidance")
_UNENFORCED = ("format", "maxLength", "minLength", "pattern")
_OPTIONAL_LINE_END, _LINE_END = '"\\n"?', '"\\n"'


def element_rules(
    form: ToolFormat, index: int, schema: Mapping[str, Any], speller: Speller
) -> Rules:
    """Rules of the arguments of tool `index`, in the order of its schema."""
    properties: Mapping[str, Any] = schema.get("properties") or {}
    required, types = schema.get("required") or (), argument_types(schema)
    shared = {key: schema[key] for key in _SHARED if key in schema}
    expressions, rules = list[str](), list[str]()
    for number, (key, part) in enumerate(properties.items()):
        name = f"argument_{index}_{number}"
        plain = types[key] == ONLY_STRING
        if plain:
            value = _text(part, _end(form), f"text_{index}_{number}", speller)
        else:
            own = {**part, **shared} if isinstance(part, Mapping) else shared
            value = Rules(f"%json {compact_json(own)} {speller.text(_end(form))}")
        opening, gap = _opening(form, key, plain, speller), _gap(form)
        rules += (*value.rules, f"{name}: {opening} {value.expression} {gap}")
        expressions.append(name if key in required else f"{name}?")
    return Rules(" ".join(expressions), tuple(rules))


def unenforced_keyword(tool: Tool) -> str | None:
    """The place of a keyword in the schema of `tool` that elements cannot enforce, if any."""
    parameters = tool.parameters or {}
    for key, types in argument_types(parameters).items():
        part = parameters["properties"][key]
        if types == ONLY_STRING and isinstance(part, Mapping):
            for keyword in _UNENFORCED:
                if keyword in part:
                    return f"$.properties.{key}.{keyword}"
    return None


def _opening(form: ToolFormat, key: str, plain: bool, speller: Speller) -> str:
    """What precedes the value of argument `key`."""
    match form:
        case ToolFormat.QWEN3_CODER:
            return speller.text(f"{qwen3_coder.TAGS.argument}{key}>\n")
        case ToolFormat.GLM45:
            name = speller.text(f"{glm.KEY}{key}{glm.KEY_END}")
            return f"{name} {_OPTIONAL_LINE_END} {speller.text(glm.VALUE)}"
        case _:
            kind = "true" if plain else "false"
            return speller.text(f'<{deepseek.DSML}parameter name="{key}" string="{kind}">')


def _end(form: ToolFormat) -> str:
    """What follows a value."""
    match form:
        case ToolFormat.QWEN3_CODER:
            return f"\n{qwen3_coder.TAGS.value_end}"
        case ToolFormat.GLM45:
            return glm.VALUE_END
        case _:
            return f"</{deepseek.DSML}parameter>"


def _gap(form: ToolFormat) -> str:
    # GLM 4.5 writes a line break after each tag, GLM 4.7 none.
    return _OPTIONAL_LINE_END if form is ToolFormat.GLM45 else _LINE_END


def _text(schema: Any, end: str, name: str, speller: Speller) -> Rules:
    """A string and the tag after it; `name` is that of the rule."""
    literals = _literals(schema)
    if literals is None:
        # A line break before the tag is no part of the value, and the tag may follow without it.
        return speller.text_until(end.removeprefix("\n"), name)
    return Rules(f"({' | '.join(map(lark_literal, literals))}) {speller.text(end)}")


def _literals(schema: Any) -> Sequence[str] | None:
    """The strings that `schema` allows if it lists them."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None
