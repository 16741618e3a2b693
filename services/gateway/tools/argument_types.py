"""Types of a tool's arguments, and conversion of arguments that a model writes as plain text.

Formats with an element for each argument write strings without quotes, so that only the schema
says whether `7` is a number or a string.
"""

import json
from collections.abc import Mapping
from typing import Any

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.json_value import JsonValue, Step

STRING = "string"
ALL_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", STRING})
"""JSON types; `number` includes `integer`."""
ONLY_STRING = frozenset({STRING})

ToolTypes = Mapping[str, frozenset[str]]
"""Types that the schema of a tool allows, by argument; arguments not named may be of any type."""

_TYPE_NAMES: Mapping[type, str] = {
    type(None): "null",
    bool: "boolean",
    float: "number",
    str: STRING,
    list: "array",
    dict: "object",
}
# What Python programs, which models imitate, write instead of JSON's literals.
_PYTHON_LITERALS = {"true": "true", "false": "false", "none": "null", "null": "null"}


def argument_types(parameters: Mapping[str, Any] | None) -> dict[str, frozenset[str]]:
    """The types of all arguments that the JSON schema `parameters` names."""
    properties = (parameters or {}).get("properties")
    if parameters is None or not isinstance(properties, Mapping):
        return {}
    reader = _TypeReader(parameters)
    return {name: reader.types(schema) for name, schema in properties.items()}


class _TypeReader:
    """Reads types of schemas in linear time: each reference is followed once."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._by_reference: dict[str, frozenset[str]] = {}

    def types(self, schema: Any) -> frozenset[str]:
        """The types that `schema` allows, or all if only a validation could say."""
        if not isinstance(schema, Mapping):
            return ALL_TYPES
        types = ALL_TYPES
        match schema.get("type"):
            case str() as name:
                types &= _with_integers({name})
            case list() as names:
                types &= _with_integers({name for name in names if isinstance(name, str)})
        if isinstance(values := schema.get("enum"), list):
            types &= frozenset(map(_type_of, values))
        if "const" in schema:
            types &= {_type_of(schema["const"])}
        if isinstance(reference := schema.get("$ref"), str):
            types &= self._referenced(reference)
        for name in ("anyOf", "oneOf"):
            if parts := _list(schema, name):
                types &= frozenset().union(*map(self.types, parts))
        for part in _list(schema, "allOf"):
            types &= self.types(part)
        return types or ALL_TYPES

    def _referenced(self, reference: str) -> frozenset[str]:
        if reference not in self._by_reference:
            # A reference to itself excludes nothing.
            self._by_reference[reference] = ALL_TYPES
            self._by_reference[reference] = self.types(_resolved(reference, self._root))
        return self._by_reference[reference]


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _with_integers(names: set[str]) -> frozenset[str]:
    return frozenset(names | {"integer"} if "number" in names else names)


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema at a reference such as `#/$defs/X`; None if there is none."""
    head, *path = reference.split("/")
    node: Any = root if head == "#" else None
    for name in path:
        node = node.get(name) if isinstance(node, Mapping) else None
    return node


def _type_of(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return "integer"
    return _TYPE_NAMES[type(value)]


def json_text(raw: str, types: frozenset[str]) -> str:
    """JSON of the value that a model wrote as `raw`.

    `types`: types that the schema allows. JSON of an allowed type is taken as it is; other text is
    a string if the schema allows strings. Text that fits no type is JSON if it can be, else a
    string, so that the client can see the error.
    """
    stripped = raw.strip(WHITESPACE)
    value = _checked(stripped)
    if value is not None and _written_types(value) & types:
        return value
    if STRING in types:
        return quoted(raw)
    literal = _PYTHON_LITERALS.get(stripped.lower())
    if literal is not None and _written_types(literal) & types:
        return literal
    return quoted(raw) if value is None else value


def quoted(text: str) -> str:
    """`text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _checked(text: str) -> str | None:
    """`text` with control characters escaped if it is a single JSON value, else None."""
    value, chars = JsonValue(), list[str]()
    step = Step.MORE
    for char in text:
        if step is Step.LAST:
            return None
        step = value.push(char)
        if step in (Step.WRONG, Step.PAST):
            return None
        chars.append(value.text)
    # A number or literal ends only at a further character.
    if step is Step.MORE and value.push(" ") is not Step.PAST:
        return None
    return "".join(chars)


def _written_types(value: str) -> frozenset[str]:
    """The types of JSON text without whitespace around it."""
    match value[0]:
        case "{":
            return frozenset({"object"})
        case "[":
            return frozenset({"array"})
        case '"':
            return ONLY_STRING
        case "t" | "f":
            return frozenset({"boolean"})
        case "n":
            return frozenset({"null"})
    whole = not set(value) & set(".eE")
    return frozenset({"integer", "number"} if whole else {"number"})
