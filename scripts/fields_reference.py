"""The effect of each field of a request, derived from the code that reads requests."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.api.chat import ChatRequest
from services.gateway.api.completion import CompletionRequest
from services.gateway.api.generation import NO_EFFECT, GenerationRequest
from services.gateway.api.parameters import CHAT, COMPLETION, Policy

ENDPOINTS: Mapping[str, tuple[type[GenerationRequest], Policy]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, COMPLETION),
}
_KINDS = {"boolean": "true or false", "integer": "whole number", "number": "number"}


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A request field as seen by the client. `effect`: works, ignored or refused."""

    name: str
    effect: str
    values: str
    note: str


def fields_of(endpoint: str) -> list[FieldRow]:
    """A row per known field, sorted by name."""
    body, policy = ENDPOINTS[endpoint]
    rows = list(_model_rows(body.model_json_schema()))
    rows += [
        FieldRow(name, "ignored", "any", _sentence(why)) for name, why in policy.ignored.items()
    ]
    for name, refused in policy.refused.items():
        neutral = " or ".join(_json(value) for value in (None, *refused.neutral))
        rows.append(FieldRow(name, "refused", f"only {neutral}", _sentence(refused.reason)))
    return sorted(rows, key=lambda row: row.name)


def _model_rows(schema: Mapping[str, Any]) -> Iterable[FieldRow]:
    definitions = schema.get("$defs", {})
    for name, field in schema["properties"].items():
        note = field.get("description", "")
        effect = _effect(field, "works")
        inner = _definition(field, definitions)
        yield FieldRow(name, effect, values_of(field) if inner is None else "an object", note)
        for key, part in (inner or {}).get("properties", {}).items():
            note = part.get("description", "")
            yield FieldRow(f"{name}.{key}", _effect(part, effect), values_of(part), note)


def _effect(field: Mapping[str, Any], otherwise: str) -> str:
    return "ignored" if field.get(NO_EFFECT) else otherwise


def _definition(
    field: Mapping[str, Any], definitions: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """The definition of the object in a field, None for other fields."""
    for option in field.get("anyOf", (field,)):
        if "$ref" in option:
            definition: Mapping[str, Any] = definitions[option["$ref"].rpartition("/")[2]]
            return definition
    return None


def values_of(schema: Mapping[str, Any]) -> str:
    """The allowed values as text, such as "0 to 2"; null is always allowed and omitted."""
    if "anyOf" in schema:
        options = (values_of(option) for option in schema["anyOf"] if option.get("type") != "null")
        return ", or ".join(dict.fromkeys(options))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    return _typed(schema)


def _typed(schema: Mapping[str, Any]) -> str:
    """The type as text, for a schema with a single type or a reference to an object."""
    match schema.get("type", "object"):
        case "string":
            return _bounded("text", schema, "Length", "characters")
        case "array":
            return _bounded(_list_of(schema["items"]), schema, "Items", "of them")
        case "object":
            return _object(schema)
        case kind:
            return _number(_KINDS[kind], schema)


def _list_of(item: Mapping[str, Any]) -> str:
    names = {"integer": "token ids", "string": "texts", "object": "objects"}
    if "anyOf" in item:
        return f"list of {' and '.join(map(values_of, item['anyOf']))}"
    return f"list of {names[item.get('type', 'object')]}"


def _number(kind: str, schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum")
    high = schema.get("maximum")
    if low is None and (above := schema.get("exclusiveMinimum")) is not None:
        low = f"above {above:g}"
    if low is None and high is None:
        return kind
    if low is not None and not isinstance(low, str):
        low = f"{low:g}" if abs(low) < 10**6 else _power(low)
    ends = [low, None if high is None else (f"{high:g}" if high < 10**6 else _power(high))]
    shown = " to ".join(end for end in ends if end is not None)
    shown += " or more" if high is None else ""
    return f"{shown}, whole" if kind == "whole number" else shown


def _power(number: int) -> str:
    """A bound as text, with bounds of machine integers as powers of 2."""
    for bits in (31, 63):
        if number == 2**bits - 1:
            return f"2^{bits} - 1"
        if number == -(2**bits):
            return f"-2^{bits}"
    return f"{number}"


def _bounded(kind: str, schema: Mapping[str, Any], keyword: str, unit: str) -> str:
    low, high = schema.get(f"min{keyword}"), schema.get(f"max{keyword}")
    if "pattern" in schema:
        return f"{kind} like `{schema['pattern']}`"
    if high is None:
        return kind if not low or keyword == "Length" else f"{kind}, at least {low}"
    return f"{kind}, {low or 0} to {high} {unit}"


def _object(schema: Mapping[str, Any]) -> str:
    values = schema.get("additionalProperties")
    if not isinstance(values, dict):
        return "an object"
    return f"an object of up to {schema['maxProperties']} token ids, each with {values_of(values)}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _json(value: Any) -> str:
    return f"`{json.dumps(value)}`"
