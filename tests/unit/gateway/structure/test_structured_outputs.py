"""Structured-output fields become grammars, within limits."""

import json
from typing import Any

import pytest

from services.core.request import GRAMMAR_BYTES_MAX, GrammarKind
from services.gateway.structure.schema import ENUM_VALUES_MAX, SCHEMA_DEPTH_MAX, schema_text
from services.gateway.structure.structured_outputs import (
    CHOICES_MAX,
    Structure,
    guided_structure,
    response_format_structure,
    structured_outputs_structure,
)
from services.gateway.vocabulary.errors import BadRequest

NAME = {"type": "object", "properties": {"name": {"type": "string"}}}


def nested(depth: int) -> dict[str, Any]:
    """A schema of this many nested objects."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"not": schema}
    return schema


def json_schema(**fields: Any) -> dict[str, Any]:
    """A response format."""
    return {"type": "json_schema", "json_schema": {"name": "n"} | fields}


def schema_of(structure: Structure | None) -> dict[str, Any]:
    """The schema in a grammar."""
    assert structure is not None and structure.grammar.kind is GrammarKind.JSON_SCHEMA
    schema: dict[str, Any] = json.loads(structure.grammar.text)
    return schema


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_plain_text_has_no_grammar(value: Any) -> None:
    assert response_format_structure(value) is None


def test_a_schema_is_kept_and_whitespace_is_bounded() -> None:
    schema = schema_of(response_format_structure(json_schema(schema=NAME, strict=True)))

    assert schema.pop("x-guidance") == {"whitespace_pattern": " ?", "lenient": False}
    assert schema == NAME | {"additionalProperties": False}


@pytest.mark.parametrize(("strict", "lenient"), [({}, True), ({"strict": False}, True)])
def test_unenforceable_keywords_are_dropped_without_strict(
    strict: dict[str, bool], lenient: bool
) -> None:
    schema = schema_of(response_format_structure(json_schema(schema=NAME, **strict)))

    assert schema["x-guidance"]["lenient"] is lenient


@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_object"},
        json_schema(),
        json_schema(schema=None),
    ],
)
def test_json_object_accepts_any_object(value: Any) -> None:
    assert schema_of(response_format_structure(value))["type"] == "object"


@pytest.mark.parametrize(
    "value",
    [
        "json",
        7,
        [],
        {},
        {"type": 3},
        {"type": "xml"},
        {"type": "structural_tag"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": []},
        json_schema(name=3),
        json_schema(strict=1),
        json_schema(schema="{}"),
        json_schema(schema={"x-guidance": 3}),
    ],
)
def test_other_formats_are_refused(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        response_format_structure(value)

    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("form", "value", "kind", "text"),
    [
        ("regex", "(a+)+$", GrammarKind.REGEX, "(a+)+$"),
        ("grammar", 'start: "a"', GrammarKind.LARK, 'start: "a"'),
        ("choice", ["a", 'b"\n', "é"], GrammarKind.LARK, 'start: "a" | "b\\"\\n" | "é"'),
    ],
)
def test_vllm_structured_outputs_are_translated(
    form: str, value: Any, kind: GrammarKind, text: str
) -> None:
    new, old = structured_outputs_structure({form: value}), guided_structure(form, value)

    assert new is not None and old is not None
    assert (new.grammar.kind, new.grammar.text) == (kind, text)
    assert old.grammar == new.grammar
    assert (new.param, old.param) == (f"structured_outputs.{form}", f"guided_{form}")


@pytest.mark.parametrize("value", [NAME, json.dumps(NAME)])
def test_vllm_schemas_may_be_strings(value: Any) -> None:
    schema = schema_of(structured_outputs_structure({"json": value, "regex": None}))

    assert schema.pop("x-guidance")["lenient"] is False
    assert schema == NAME | {"additionalProperties": False}
    assert schema_of(structured_outputs_structure({"json_object": True}))["type"] == "object"


@pytest.mark.parametrize(
    "value",
    [
        "a",
        {},
        {"regex": "a", "choice": ["b"]},
        {"what": "a"},
        {"json": "{"},
        {"json": "[1]"},
        {"json": 3},
        {"json_object": "yes"},
        {"regex": ""},
        {"regex": 3},
        {"regex": "\ud800"},
        {"grammar": ["a"]},
        {"choice": []},
        {"choice": "abc"},
        {"choice": ["a", ""]},
        {"choice": ["a", 3]},
        {"choice": ["a"] * (CHOICES_MAX + 1)},
        {"choice": ["a" * GRAMMAR_BYTES_MAX]},
        {"regex": "é" * (GRAMMAR_BYTES_MAX // 2 + 1)},
    ],
)
def test_other_forms_are_refused(value: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        structured_outputs_structure(value)

    assert str(caught.value.param).startswith("structured_outputs")


@pytest.mark.parametrize(
    "schema",
    [
        nested(SCHEMA_DEPTH_MAX + 1),
        nested(5000),
        {"enum": list(range(ENUM_VALUES_MAX + 1))},
        {"anyOf": [{"enum": list(range(600))}, {"enum": list(range(600))}]},
        {"description": "x" * GRAMMAR_BYTES_MAX},
        {"description": "\ud800"},
        {"$ref": "https://example.org/schema"},
        {"properties": {"a": {"$ref": "other.json#/a"}}},
    ],
)
def test_schemas_over_a_limit_are_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="'p'"):
        schema_text(schema, "p")


@pytest.mark.parametrize(
    "schema",
    [
        nested(SCHEMA_DEPTH_MAX),
        {"enum": list(range(ENUM_VALUES_MAX))},
        {"properties": {"next": {"$ref": "#"}}, "additionalProperties": True},
        {"const": {"$ref": "https://example.org"}},
        {
            "properties": {"$ref": {"type": "string"}, "enum": {"type": "integer"}},
            "additionalProperties": True,
        },
    ],
)
def test_schemas_within_the_limits_are_kept(schema: dict[str, Any]) -> None:
    kept = json.loads(schema_text(schema, "p"))

    assert {key: value for key, value in kept.items() if key != "x-guidance"} == schema


def test_a_schema_that_gets_too_long_by_being_closed_stays_open() -> None:
    schema = {"properties": {"a": {}}, "description": "x" * (GRAMMAR_BYTES_MAX - 150)}
    assert "additionalProperties" in schema_text(schema, "p")
    schema["description"] += "x" * 50
    assert "additionalProperties" not in schema_text(schema, "p")


def test_client_options_are_kept() -> None:
    options = {"whitespace_flexible": False}

    assert json.loads(schema_text({"x-guidance": options}, "p"))["x-guidance"] == options
