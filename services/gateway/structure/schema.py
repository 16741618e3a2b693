"""Checks the limits of clients' JSON schemas and prepares the schemas as grammars."""

import json
from collections.abc import Mapping
from typing import Any

from services.core.request import GRAMMAR_BYTES_MAX
from services.gateway.structure.additional_properties import forbid_additional_properties
from services.gateway.vocabulary.errors import BadRequest

SCHEMA_DEPTH_MAX = 64
"""Maximum nesting of objects and lists."""
ENUM_VALUES_MAX = 1000
"""Maximum values in all `enum` lists of a schema together."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

OPTIONS = "x-guidance"
"""Key of a schema's options for llguidance."""

# Allow at most one space where JSON allows any whitespace: small models may write it endlessly.
_COMPACT = {"whitespace_pattern": " ?"}
# Values of these keys are data: "$ref" in them is no reference.
_DATA_KEYS = frozenset({"const", "default", "enum", "example", "examples"})


def schema_text(schema: Mapping[str, Any], param: str, lenient: bool = False) -> str:
    """Return the schema as JSON, with llguidance's options and `additionalProperties: false`.

    `lenient`: ignore keywords that cannot be enforced instead of refusing them. Options that the
    client itself sets take precedence.

    Raises:
        BadRequest: if the schema is over a limit or refers to another document.
    """
    check_schema(schema, param)
    options = schema.get(OPTIONS, _COMPACT | {"lenient": lenient})
    if not isinstance(options, Mapping):
        raise BadRequest(
            f"'{OPTIONS}' in the schema of '{param}' must be an object; leave it out", param=param
        )
    return _narrowed(json_text({**schema, OPTIONS: options}, param))


def _narrowed(text: str) -> str:
    """Forbid additional properties, unless that makes the schema too long."""
    schema = json.loads(text)
    options = schema.pop(OPTIONS)
    forbid_additional_properties(schema)
    narrow = compact_json({**schema, OPTIONS: options})
    return narrow if len(narrow.encode()) <= GRAMMAR_BYTES_MAX else text


def json_text(value: Any, param: str) -> str:
    """Encode compact JSON. Raises BadRequest if the text is too long for a grammar."""
    text = compact_json(value)
    check_size(text, param)
    return text


def compact_json(value: Any) -> str:
    """Encode JSON without whitespace."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def check_size(text: str, param: str) -> None:
    """Raise BadRequest if `text` is too long for a grammar or has no UTF-8 form."""
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise BadRequest(
            f"'{param}' contains a lone surrogate; send valid Unicode",
            param=param,
        ) from None
    if size_bytes > GRAMMAR_BYTES_MAX:
        raise BadRequest(
            f"'{param}' has {size_bytes} bytes, but at most {GRAMMAR_BYTES_MAX} are allowed; "
            "shorten it",
            param=param,
        )


def check_schema(schema: Mapping[str, Any], param: str) -> None:
    """Raise BadRequest if a schema exceeds a limit or refers to another document."""
    enum_values = 0
    # An explicit stack: a deep schema would exhaust the recursion limit.
    todo: list[tuple[Any, int, bool]] = [(schema, 1, True)]
    while todo:
        node, depth, is_schema = todo.pop()
        if not isinstance(node, (dict, list)):
            continue
        if depth > SCHEMA_DEPTH_MAX:
            raise BadRequest(
                f"the schema of '{param}' is nested deeper than {SCHEMA_DEPTH_MAX}; flatten it",
                param=param,
            )
        if isinstance(node, list):
            todo += [(item, depth + 1, is_schema) for item in node]
            continue
        if is_schema:
            enum_values += _enum_values(node)
            _check_reference(node, param)
        if enum_values > ENUM_VALUES_MAX:
            raise BadRequest(
                f"the schema of '{param}' has more than {ENUM_VALUES_MAX} values in 'enum'; "
                "use a pattern or fewer values",
                param=param,
            )
        todo += [
            (value, depth + 1, is_schema and key not in _DATA_KEYS) for key, value in node.items()
        ]


def _enum_values(node: Mapping[str, Any]) -> int:
    values = node.get("enum")
    return len(values) if isinstance(values, list) else 0


def _check_reference(node: Mapping[str, Any], param: str) -> None:
    for key in ("$ref", "$dynamicRef"):
        reference = node.get(key)
        if isinstance(reference, str) and not reference.startswith("#"):
            raise BadRequest(
                f"the schema of '{param}' refers to {reference[:64]!a}, but other documents are "
                "not fetched; copy the definition into '$defs' and refer to '#/$defs/…'",
                param=param,
            )
