"""JSON schemas with short values only, so that generation ends with any model."""

from typing import Any

WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
SHORT = {"type": "string", "maxLength": 12}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


def of(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def listed(items: Any, least: int = 0, most: int = 3) -> dict[str, Any]:
    """A list of `least` to `most` items."""
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS: list[dict[str, Any]] = [
    of(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 130}),
    of(city=WORD, country=WORD, capital={"type": "boolean"}),
    of(answer={"enum": ["yes", "no", "perhaps"]}),
    of(tags=listed(WORD, 1, 4)),
    of(point=of(x=DIGIT, y=DIGIT), label=SHORT),
    of(rows=listed(of(id=DIGIT, name=WORD), 1, 3)),
    of(value={"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    of(value={"anyOf": [DIGIT, {"enum": ["none", "many"]}]}),
    of(day={"type": "string", "format": "date"}, hour={"type": "integer", "enum": [6, 12, 18]}),
    of(kind={"const": "person"}, name=WORD),
    {"$ref": "#/$defs/pair", "$defs": {"pair": of(left=WORD, right=WORD)}},
    {"type": "object", "properties": {"a": DIGIT, "b": WORD}, "additionalProperties": False},
    {"oneOf": [of(cat=WORD), of(dog=WORD)]},
    listed(DIGIT, 2, 4),
    listed({"enum": ["red", "green", "blue"]}, 1, 3),
    {"enum": ["small", "medium", "large", 1, 2.5, None]},
    {"type": "integer", "minimum": -20, "maximum": 20},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    of(pair={"type": "array", "prefixItems": [WORD, DIGIT], "items": False, "minItems": 2}),
    of(deep=of(deeper=of(deepest=listed(of(n=DIGIT), 0, 2)))),
]
