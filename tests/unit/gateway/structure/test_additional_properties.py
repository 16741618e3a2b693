"""Client schemas are closed only where every output stays valid."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from services.gateway.structure.additional_properties import forbid_additional_properties

NAMED = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = NAMED | {"additionalProperties": False}
MORE = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
REFERENCE = {"$ref": "#/$defs/x"}


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    closed_schema = copy.deepcopy(schema)
    forbid_additional_properties(closed_schema)
    return closed_schema


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (NAMED, CLOSED),
        (
            {"properties": {"inner": NAMED}},
            {"properties": {"inner": CLOSED}, "additionalProperties": False},
        ),
        ({"items": NAMED, "prefixItems": [NAMED]}, {"items": CLOSED, "prefixItems": [CLOSED]}),
        ({"anyOf": [NAMED, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"allOf": [NAMED], "title": "t"}, {"allOf": [CLOSED], "title": "t"}),
        (
            {"additionalProperties": True, "properties": {"inner": NAMED}},
            {"additionalProperties": True, "properties": {"inner": CLOSED}},
        ),
        ({"$defs": {"x": NAMED}, **REFERENCE}, {"$defs": {"x": CLOSED}, **REFERENCE}),
        (
            {"$defs": {"x": NAMED}, "items": REFERENCE | {"description": "d"}},
            {"$defs": {"x": CLOSED}, "items": REFERENCE | {"description": "d"}},
        ),
        (
            {"$defs": {"x": NAMED | {"properties": {"next": REFERENCE}}}, "items": REFERENCE},
            {"$defs": {"x": CLOSED | {"properties": {"next": REFERENCE}}}, "items": REFERENCE},
        ),
        (
            {"$defs": {"x": NAMED}, **REFERENCE, "type": "object", "$schema": "s"},
            {"$defs": {"x": CLOSED}, **REFERENCE, "type": "object", "$schema": "s"},
        ),
        (
            {"type": "object", "anyOf": [NAMED, REFERENCE], "$defs": {"x": NAMED}},
            {"type": "object", "anyOf": [CLOSED, REFERENCE], "$defs": {"x": CLOSED}},
        ),
        (
            NAMED | {"properties": {"a": {"$ref": "#"}}},
            CLOSED | {"properties": {"a": {"$ref": "#"}}},
        ),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert closed(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        NAMED | {"additionalProperties": {"type": "string"}},
        NAMED | {"unevaluatedProperties": True},
        NAMED | {"patternProperties": {"^x": {"type": "integer"}}},
        NAMED | {"propertyNames": {"maxLength": 3}},
        NAMED | {"minProperties": 2},
        NAMED | {"required": ["b"]},
        NAMED | {"dependentRequired": {"a": ["b"]}},
        NAMED | {"allOf": [MORE]},
        NAMED | {"anyOf": [MORE]},
        NAMED | {"const": {"a": 1, "b": 2}},
        {"allOf": [NAMED, MORE]},
        {"oneOf": [NAMED, MORE]},
        {"not": NAMED},
        {"if": NAMED, "then": MORE},
        {"$defs": {"x": NAMED}, "properties": {"p": REFERENCE | {"required": ["b"]}}},
        {"$defs": {"x": NAMED}, "properties": {"p": {"allOf": [REFERENCE, MORE]}, "q": REFERENCE}},
        NAMED | {"properties": {"a": {"allOf": [{"$ref": "#"}, MORE]}}},
        NAMED | {"properties": {"a": {"$ref": "#/properties/b"}, "b": MORE}},
        NAMED | {"properties": {"a": {"$ref": "#/$defs/absent"}}},
        {"default": NAMED, "examples": [NAMED]},
    ],
)
def test_other_schemas_are_unchanged(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


KINDS = ["leaf", "leaf", "object", "object", "array", "anyOf", "allOf", "reference"]


def drawn_schema(
    rng: random.Random, depth: int, kinds: Sequence[str] = tuple(KINDS)
) -> dict[str, Any]:
    kind = rng.choice(kinds)
    if depth == 0 or kind == "leaf":
        return rng.choice([{"type": "integer"}, {"type": "boolean"}, {}])
    if kind == "array":
        return {"type": "array", "items": drawn_schema(rng, depth - 1, kinds)}
    if kind in ("anyOf", "allOf"):
        return {kind: [drawn_schema(rng, depth - 1, kinds) for _ in range(rng.randint(1, 2))]}
    if kind == "reference":
        return {"$ref": f"#/$defs/{rng.choice('xy')}"}
    names = rng.sample("abc", rng.randint(0, 3))
    schema: dict[str, Any] = {"type": "object"}
    schema["properties"] = {name: drawn_schema(rng, depth - 1, kinds) for name in names}
    if rng.random() < 0.5:
        schema["required"] = rng.sample("abc", rng.randint(0, 2))
    return schema


def drawn_value(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["leaf", "object", "object", "array"]) if depth else "leaf"
    if kind == "leaf":
        return rng.choice([0, True])
    if kind == "array":
        return [drawn_value(rng, depth - 1) for _ in range(rng.randint(0, 2))]
    return {name: drawn_value(rng, depth - 1) for name in rng.sample("abc", rng.randint(0, 3))}


def test_values_of_the_closed_schema_satisfy_the_open_schema() -> None:
    rng = random.Random(11)
    narrower = 0
    for _ in range(300):
        definitions = {"x": drawn_schema(rng, 2, KINDS[:-1]), "y": {}}
        schema = drawn_schema(rng, 3) | {"$defs": definitions}
        narrow = closed(schema)
        before = jsonschema.Draft202012Validator(schema)
        after = jsonschema.Draft202012Validator(narrow)
        values = [drawn_value(rng, 3) for _ in range(60)]
        taken = [value for value in values if before.is_valid(value)]
        still = [value for value in taken if after.is_valid(value)]
        assert not any(after.is_valid(value) for value in values if value not in taken)
        narrower += narrow != schema and len(still) < len(taken)
    assert narrower > 20
