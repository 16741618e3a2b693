"""The schema determines the type of an unquoted value."""

import json
from random import Random
from typing import Any

import pytest

from services.gateway.tools.argument_types import (
    ALL_TYPES,
    ONLY_STRING,
    argument_types,
    json_text,
)

INTEGER = frozenset({"integer"})


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ONLY_STRING),
        ({"type": "number"}, {"integer", "number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", "b"]}, ONLY_STRING),
        ({"enum": ["a", None, 1, 1.5, True, [], {}]}, ALL_TYPES),
        ({"const": 3}, INTEGER),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, ONLY_STRING),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, INTEGER),
        ({"$ref": "#/$defs/whole"}, INTEGER),
        ({"$ref": "#/$defs/itself"}, ALL_TYPES),
        ({"$ref": "#/$defs/none"}, ALL_TYPES),
        ({"$ref": "https://example.org"}, ALL_TYPES),
        ({"type": "string", "const": 3}, ALL_TYPES),
        ({}, ALL_TYPES),
        (True, ALL_TYPES),
    ],
)
def test_types_are_read_from_a_schema(schema: Any, types: frozenset[str]) -> None:
    itself = {"anyOf": [{"$ref": "#/$defs/itself"}, {"$ref": "#/$defs/itself"}]}
    parameters = {
        "type": "object",
        "properties": {"a": schema},
        "$defs": {"whole": {"type": "integer"}, "itself": itself},
    }

    assert argument_types(parameters) == {"a": types}


def test_no_properties_have_no_types() -> None:
    assert argument_types(None) == argument_types({"properties": []}) == {}


@pytest.mark.parametrize(
    ("raw", "types", "value"),
    [
        ("7", INTEGER, 7),
        (" 7\n", INTEGER, 7),
        ("7", ONLY_STRING, "7"),
        ("7", {"string", "null"}, "7"),
        ("7", {"string", "integer"}, 7),
        ("null", {"string", "null"}, None),
        ("None", {"integer", "null"}, None),
        ("True", {"boolean"}, True),
        ('"a"', {"string", "null"}, "a"),
        ("a", {"string", "null"}, "a"),
        ("7.5", INTEGER, 7.5),
        ("seven", INTEGER, "seven"),
        ("7 8", INTEGER, "7 8"),
        ("NaN", {"number"}, "NaN"),
        ("007", INTEGER, "007"),
        ('{"a": "b\nc"}', {"object"}, {"a": "b\nc"}),
        ("{'a': 1}", {"object"}, "{'a': 1}"),
        ("", INTEGER, ""),
        ("[1", {"array"}, "[1"),
        ("7" * 5000, INTEGER, None),
    ],
)
def test_values_are_converted_by_type(raw: str, types: frozenset[str], value: Any) -> None:
    text = json_text(raw, frozenset(types))

    # Python reads no integers of thousands of digits.
    assert text == raw if len(raw) > 4000 else json.loads(text) == value


@pytest.mark.parametrize("seed", range(200))
def test_any_text_converts_to_json(seed: int) -> None:
    rng = Random(seed)
    raw = "".join(rng.choices('{}[]",:0-.e1tfn \n\\aé', k=rng.randrange(8)))
    types = frozenset(rng.sample(sorted(ALL_TYPES), rng.randrange(1, 8)))

    value = json.loads(json_text(raw, types), parse_constant=pytest.fail)

    if types == ONLY_STRING and not raw.strip().startswith('"'):
        assert value == raw
