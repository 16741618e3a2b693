"""Each keyword of JSON Schema is enforced, or reported with its path."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY
from llguidance import LLMatcher

from services.common.grammar import source_of
from services.core.request import Grammar, GrammarKind
from services.gateway.structure.check_process import byte_tokenizer, check
from services.gateway.structure.schema import schema_text
from services.gateway.structure.unenforced import UNENFORCED

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
TOKENIZER = byte_tokenizer(300, {})
VOCABULARIES = "https://json-schema.org/draft/2020-12/meta/"
A, B = {"a": 1}, {"a": 1, "b": 1}


class Treatment(StrEnum):
    ENFORCED = "enforced"
    WARNED = "warned"
    """A warning if the schema is not strict, else refused."""
    ANNOTATION = "annotation"
    """Excludes no value."""


@dataclass(frozen=True)
class Row:
    """A schema with the keyword, a value that is valid and a value that is not."""

    treatment: Treatment
    schema: dict[str, Any]
    valid: Any
    invalid: Any = None


ENFORCED, WARNED, ANNOTATION = Treatment
OBJECT, STRING, NULL = {"type": "object"}, {"type": "string"}, {"type": "null"}
ROWS: dict[str, Row] = {
    "$anchor": Row(ENFORCED, {"$ref": "#t", "$defs": {"x": NULL | {"$anchor": "t"}}}, None, 1),
    "$comment": Row(ANNOTATION, {"$comment": "c"}, 1),
    "$defs": Row(ENFORCED, {"$ref": "#/$defs/x", "$defs": {"x": NULL}}, None, 1),
    "$dynamicAnchor": Row(ANNOTATION, {"$dynamicAnchor": "t"}, 1),
    "$dynamicRef": Row(
        WARNED, {"$dynamicRef": "#t", "$defs": {"x": NULL | {"$dynamicAnchor": "t"}}}, None, 1
    ),
    "$id": Row(ANNOTATION, {"$id": "https://example.org/s"}, 1),
    "$ref": Row(ENFORCED, {"properties": {"a": {"$ref": "#"}}} | OBJECT, {"a": {}}, {"a": 1}),
    "$schema": Row(ANNOTATION, {"$schema": "https://json-schema.org/draft/2020-12/schema"}, 1),
    "$vocabulary": Row(ANNOTATION, {"$vocabulary": {VOCABULARIES + "core": True}}, 1),
    "additionalProperties": Row(ENFORCED, OBJECT | {"additionalProperties": NULL}, {}, A),
    "allOf": Row(ENFORCED, {"allOf": [{"minimum": 1}, {"maximum": 2}]}, 1, 3),
    "anyOf": Row(ENFORCED, {"anyOf": [NULL, {"type": "string"}]}, "a", 1),
    "const": Row(ENFORCED, {"const": A}, A, {}),
    "contains": Row(WARNED, {"type": "array", "contains": NULL}, [None], [1]),
    "contentEncoding": Row(WARNED, STRING | {"contentEncoding": "base64"}, "YQ=="),
    "contentMediaType": Row(WARNED, STRING | {"contentMediaType": "application/json"}, "1"),
    # It has no effect without contentMediaType.
    "contentSchema": Row(ANNOTATION, {"contentSchema": NULL}, "1"),
    "default": Row(ANNOTATION, {"default": 1}, 2),
    "dependentRequired": Row(WARNED, OBJECT | {"dependentRequired": {"a": ["b"]}}, B, A),
    "dependentSchemas": Row(WARNED, OBJECT | {"dependentSchemas": {"a": False}}, {}, A),
    "deprecated": Row(ANNOTATION, {"deprecated": True}, 1),
    "description": Row(ANNOTATION, {"description": "d"}, 1),
    # Without an effect on its own.
    "else": Row(ANNOTATION, {"else": False}, 1),
    "enum": Row(ENFORCED, {"enum": [1, [2]]}, [2], 3),
    "examples": Row(ANNOTATION, {"examples": [1]}, 2),
    "exclusiveMaximum": Row(ENFORCED, {"exclusiveMaximum": 3}, 2.5, 3),
    "exclusiveMinimum": Row(ENFORCED, {"exclusiveMinimum": 3}, 3.5, 3),
    "format": Row(ENFORCED, {"format": "ipv4"}, "1.2.3.4", "1"),
    "if": Row(WARNED, {"if": {"type": "number"}, "then": {"minimum": 3}}, 3, 2),
    "items": Row(ENFORCED, {"items": NULL}, [None], [1]),
    # They have no effect without contains.
    "maxContains": Row(ANNOTATION, {"maxContains": 0}, [1]),
    "minContains": Row(ANNOTATION, {"minContains": 3}, [1]),
    "maxItems": Row(ENFORCED, {"maxItems": 1}, [1], [1, 2]),
    "maxLength": Row(ENFORCED, {"maxLength": 1}, "a", "ab"),
    "maxProperties": Row(ENFORCED, OBJECT | {"maxProperties": 1}, A, B),
    "maximum": Row(ENFORCED, {"maximum": 3}, 3, 3.5),
    "minItems": Row(ENFORCED, {"minItems": 1}, [1], []),
    "minLength": Row(ENFORCED, {"minLength": 2}, "ab", "a"),
    "minProperties": Row(ENFORCED, OBJECT | {"minProperties": 2}, B, A),
    "minimum": Row(ENFORCED, {"minimum": 3}, 3, 2.5),
    "multipleOf": Row(ENFORCED, {"type": "number", "multipleOf": 0.5}, 1.5, 1.3),
    "not": Row(WARNED, {"not": NULL}, 1, None),
    "oneOf": Row(ENFORCED, {"oneOf": [NULL, {"type": "string"}]}, "a", 1),
    "pattern": Row(ENFORCED, {"pattern": "^a"}, "ab", "b"),
    "patternProperties": Row(ENFORCED, OBJECT | {"patternProperties": {"^a": NULL}}, {}, A),
    "prefixItems": Row(ENFORCED, {"prefixItems": [NULL]}, [None], [1]),
    "properties": Row(ENFORCED, {"properties": {"a": NULL}}, {"a": None}, A),
    "propertyNames": Row(WARNED, OBJECT | {"propertyNames": {"maxLength": 1}}, A, {"ab": 1}),
    "readOnly": Row(ANNOTATION, {"readOnly": True}, 1),
    "required": Row(ENFORCED, OBJECT | {"required": ["a"]}, A, {"b": 1}),
    "then": Row(ANNOTATION, {"then": False}, 1),
    "title": Row(ANNOTATION, {"title": "t"}, 1),
    "type": Row(ENFORCED, {"type": ["null", "string"]}, "a", 1),
    "unevaluatedItems": Row(WARNED, {"type": "array", "unevaluatedItems": False}, [], [1]),
    "unevaluatedProperties": Row(WARNED, OBJECT | {"unevaluatedProperties": False}, {}, A),
    "uniqueItems": Row(WARNED, {"type": "array", "uniqueItems": True}, [1, 2], [1, 1]),
    "writeOnly": Row(ANNOTATION, {"writeOnly": True}, 1),
}  # fmt: skip


def checked(schema: dict[str, Any], lenient: bool) -> tuple[Grammar, dict[str, Any]]:
    """The enforced grammar and the result of its check."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, schema_text(schema, "p", lenient))
    result = check(grammar, TOKENIZER)
    return Grammar(grammar.kind, result["text"] or grammar.text), result


def permits(grammar: Grammar, value: Any) -> bool:
    """Whether the grammar accepts the JSON of the value as a complete output."""
    matcher = LLMatcher(TOKENIZER, source_of(grammar), log_level=0)
    tokens = TOKENIZER.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_the_table_has_every_keyword() -> None:
    vocabularies = [uri for uri in REGISTRY if uri.startswith(VOCABULARIES)]
    keywords = {key for uri in vocabularies for key in REGISTRY.contents(uri).get("properties", ())}
    assert len(vocabularies) == 8 and ROWS.keys() == keywords
    # Keywords of older dialects.
    older = {"dependencies", "$recursiveRef"}
    warned = {keyword for keyword, row in ROWS.items() if row.treatment is WARNED}
    assert warned | older == UNENFORCED


@pytest.mark.parametrize("keyword", ROWS)
def test_a_keyword_is_enforced_or_reported(keyword: str) -> None:
    row = ROWS[keyword]
    validator = jsonschema.Draft202012Validator(row.schema, format_checker=FORMATS)
    lenient, result = checked(row.schema, lenient=True)
    _, strict = checked(row.schema, lenient=False)

    assert result["error"] is None and validator.is_valid(row.valid)
    assert permits(lenient, row.valid)
    if row.treatment is WARNED:
        assert result["ignored"] == [f"$.{keyword}"]
        assert strict["error"] == f"$.{keyword}"
        return
    assert result["ignored"] == [] and strict["error"] is None
    if row.treatment is ENFORCED:
        assert not validator.is_valid(row.invalid) and not permits(lenient, row.invalid)


LOOK = "look-around, including look-ahead and look-behind, is not supported"
OPTIONAL = {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}}
OPEN, CLOSED = ({"additionalProperties": more, **OPTIONAL} for more in (True, False))


@pytest.mark.parametrize(
    ("schema", "report", "valid"),
    [
        ({"type": "string", "pattern": "^(?!\\.)a"}, f"$.pattern ({LOOK})", "b"),
        ({"pattern": "(a)\\1"}, "$.pattern (backreferences are not supported)", "b"),
        ({"pattern": "(a"}, "$.pattern (unclosed group)", "b"),
        ({"pattern": "a\\b"}, "$.pattern (lookarounds not supported yet; WordUnicode)", "b"),
        (
            {"properties": {"x y": {"items": {"pattern": "(?=a)"}}}},
            f"$.properties['x y'].items.pattern ({LOOK})",
            {"x y": ["b"]},
        ),
        (
            {"properties": {"a'b\"c\\d\n": {"not": NULL}}},
            "$.properties['a\\'b\"c\\\\d\\n'].not",
            {"a'b\"c\\d\n": 1},
        ),
        ({"then": {"minimum": 3}, "if": {"type": "number"}}, "$.if", 3),
        ({"maxContains": 1, "minContains": 0, "contains": NULL}, "$.contains", 3),
        (
            {"anyOf": [NULL, {"type": "string", "pattern": "(?=a)", "minLength": 2}]},
            f"$.anyOf[1].pattern ({LOOK})",
            "bc",
        ),
        (
            {"$ref": "#/$defs/m", "$defs": {"m": {"pattern": "(?=a)"}}},
            f"$.$defs.m.pattern ({LOOK})",
            "b",
        ),
        (
            OBJECT | {"patternProperties": {"(?=a)": {}, "^b": NULL}},
            f"$.patternProperties['(?=a)'] ({LOOK})",
            {"c": 1, "b": None},
        ),
        ({"format": "regex"}, "$.format (Unknown format: regex)", "a"),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            "$.oneOf (several may match)",
            1.5,
        ),
        (OPTIONAL | {"minProperties": 1}, "$.minProperties (there are optional properties)", A),
        (CLOSED | {"minProperties": 2}, "$.minProperties (there are optional properties)", B),
        (OPEN | {"maxProperties": 1}, "$.maxProperties (there are optional properties)", A),
        ({"allOf": [OPTIONAL, {"minProperties": 1}]}, "$.allOf[1].minProperties", A),
        ({"$schema": "https://example.org/own"}, "$.$schema (unknown dialect)", 1),
        ({"$recursiveRef": "#"}, "$.$recursiveRef", 1),
        (OBJECT | {"dependencies": {"a": ["b"]}}, "$.dependencies", A),
    ],
)
def test_a_part_that_is_not_enforced_is_left_out_or_refused(
    schema: dict[str, Any], report: str, valid: Any
) -> None:
    grammar, result = checked(schema, lenient=True)
    _, strict = checked(schema, lenient=False)

    assert result["error"] is None and result["ignored"] == [report]
    assert permits(grammar, valid)
    assert strict["error"] == report


def test_the_other_parts_stay_enforced() -> None:
    mail = {"type": "string", "pattern": "(?=a)", "maxLength": 3}
    schema = {"type": "object", "properties": {"m": mail, "n": {"pattern": "^a+$"}}}
    grammar, _ = checked(schema | {"required": ["m"]}, lenient=True)

    assert permits(grammar, {"m": "xyz", "n": "aa"})
    assert not permits(grammar, {"m": "wxyz"})
    assert not permits(grammar, {"m": "xyz", "n": "b"})
    assert not permits(grammar, {"m": "xyz", "o": 1})


def test_counts_of_optional_properties_that_are_enforced() -> None:
    at_most, _ = checked(CLOSED | {"maxProperties": 1}, lenient=False)
    assert permits(at_most, {}) and permits(at_most, A) and not permits(at_most, B)
    at_least, _ = checked(CLOSED | {"minProperties": 1}, lenient=False)
    assert not permits(at_least, {}) and permits(at_least, A) and permits(at_least, B)


def test_pattern_properties_do_not_close_the_object() -> None:
    patterns = {"patternProperties": {"(?=a)": {}}, "additionalProperties": False}
    grammar, result = checked(OBJECT | patterns, lenient=True)

    assert result["ignored"] == [
        f"$.patternProperties['(?=a)'] ({LOOK})",
        "$.additionalProperties",
    ]
    assert permits(grammar, A)


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": False},
        {"unevaluatedProperties": True},
        {"propertyNames": {"type": "string"}},
        {"dependentRequired": {}},
        {"dependentRequired": {"a": []}},
        {"dependencies": {"a": {}, "b": []}},
        {"not": False},
        {"if": NULL},
        {"then": True, "if": NULL, "else": {}},
        {"contains": {}, "minContains": 0},
        OPTIONAL | {"minProperties": 0},
        OPTIONAL | {"minProperties": 1, "required": ["a"]},
        OPTIONAL | {"maxProperties": 3, "additionalProperties": False},
        {"properties": {"uniqueItems": {"description": "not"}, "contentEncoding": {}}},
        {"const": {"uniqueItems": True}},
    ],
)
def test_keywords_without_effect_are_accepted(schema: dict[str, Any]) -> None:
    for lenient in (False, True):
        _, result = checked(schema, lenient)
        assert (result["error"], result["ignored"]) == (None, [])


ENDLESS = {"type": "array", "items": {"$ref": "#/$defs/l"}, "minItems": 1}


@pytest.mark.parametrize(
    "schema",
    [
        OBJECT | {"properties": {"next": {"$ref": "#"}}},
        {"$ref": "#/$defs/l", "$defs": {"l": {"anyOf": [ENDLESS, NULL]}}},
        OBJECT | {"properties": {"l": {"$ref": "#/$defs/l"}}, "$defs": {"l": ENDLESS}},
    ],
)
def test_recursive_references_are_accepted(schema: dict[str, Any]) -> None:
    assert checked(schema, lenient=False)[1]["error"] is None


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"items": {"type": "strin"}}, "$.items (Invalid type: strin)"),
        ({"properties": {"a": {"minimum": "3"}}}, "$.properties.a (Expected f64 for 'minimum'"),
        ({"allOf": [{"type": "array", "minItems": 2, "maxItems": 1}]}, "$.allOf[0] (Unsatis"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "$.properties.a.$ref refers to nothing"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}, "$.$ref refers to itself"),
        (
            OBJECT | {"properties": {"a": {"items": {"$ref": "#/properties/a/items"}}}},
            "$.properties.a.items.$ref refers to itself",
        ),
        (
            OBJECT | {"properties": {"next": {"$ref": "#"}}, "required": ["next"]},
            "$.properties.next.$ref requires itself without an end",
        ),
        (
            {"$ref": "#/$defs/l", "$defs": {"l": {"anyOf": [ENDLESS, ENDLESS]}}},
            "$.$ref requires itself without an end",
        ),
        ({"allOf": [{"$ref": "#"}, NULL]}, "$.allOf[0].$ref requires itself"),
        ({"required": [{}, 1], "properties": {"a": {}}}, "$ (Expected string"),
        ({"properties": []}, "$ (properties must be an object)"),
    ],
)
def test_errors_name_the_path_of_the_keyword(schema: dict[str, Any], error: str) -> None:
    for lenient in (False, True):
        _, result = checked(schema, lenient)
        assert result["error"].startswith(error)
        assert "json-schema:" not in result["error"]
