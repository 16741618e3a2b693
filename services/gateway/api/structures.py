"""The fields for structured output: parsers and JSON schemas."""

from functools import partial
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.structure.structured_outputs import (
    CHOICES_MAX,
    Structure,
    guided_structure,
    response_format_structure,
    structured_outputs_structure,
)

_NULL = {"type": "null"}
_TEXT = {"type": "string", "minLength": 1}
_SCHEMA = {"anyOf": [{"type": "object"}, _TEXT]}
_CHOICES = {"type": "array", "minItems": 1, "maxItems": CHOICES_MAX, "items": _TEXT}

ResponseFormat = Annotated[
    Structure | None,
    PlainValidator(response_format_structure),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {
                        "type": {"enum": ["text", "json_object", "json_schema"]},
                        "json_schema": {
                            "type": "object",
                            "properties": {
                                "name": {"type": "string"},
                                "schema": {"type": "object"},
                                "strict": {"type": "boolean"},
                            },
                        },
                    },
                },
                _NULL,
            ]
        }
    ),
]
StructuredOutputs = Annotated[
    Structure | None,
    PlainValidator(structured_outputs_structure),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "minProperties": 1,
                    "maxProperties": 1,
                    "properties": {
                        "json": _SCHEMA,
                        "regex": _TEXT,
                        "choice": _CHOICES,
                        "grammar": _TEXT,
                        "json_object": {"const": True},
                    },
                },
                _NULL,
            ]
        }
    ),
]
GuidedJson = Annotated[
    Structure | None,
    PlainValidator(partial(guided_structure, "json")),
    WithJsonSchema({"anyOf": [_SCHEMA, _NULL]}),
]
GuidedRegex = Annotated[
    Structure | None,
    PlainValidator(partial(guided_structure, "regex")),
    WithJsonSchema({"anyOf": [_TEXT, _NULL]}),
]
GuidedChoice = Annotated[
    Structure | None,
    PlainValidator(partial(guided_structure, "choice")),
    WithJsonSchema({"anyOf": [_CHOICES, _NULL]}),
]
GuidedGrammar = Annotated[
    Structure | None,
    PlainValidator(partial(guided_structure, "grammar")),
    WithJsonSchema({"anyOf": [_TEXT, _NULL]}),
]
