"""What /openapi.json says of routes whose bodies are read by `json_body`."""

from typing import Any

from pydantic import BaseModel

from services.gateway.api.parameters import Policy

_ERROR = {
    "description": "An error; its message says the cause and the remedy.",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": ["string", "null"]},
                        },
                    }
                },
            }
        }
    },
}


def takes(kind: type[BaseModel], policy: Policy | None = None) -> dict[str, Any]:
    """The part of a route's description that tells what it takes and how it refuses.

    The bodies are parsed stricter than the framework would. `policy` has the fields that are
    ignored.
    """
    name = kind.__name__
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{name}{{model}}")
    definitions = schema.pop("$defs", {})
    for inner, definition in definitions.items():
        _inline(schema, f"#/components/schemas/{name}{inner}", definition)
    # Unknown fields are ignored by default.
    schema.pop("additionalProperties", None)
    for ignored, why in (policy.ignored if policy is not None else {}).items():
        schema["properties"][ignored] = {"description": f"Ignored: {why}."}
    content = {"application/json": {"schema": schema}}
    return {
        "requestBody": {"required": True, "content": content},
        "responses": {"4XX": _ERROR, "5XX": _ERROR},
    }


def _inline(node: Any, reference: str, definition: dict[str, Any]) -> None:
    """Replace references in `node`, in place."""
    if isinstance(node, dict):
        if node.get("$ref") == reference:
            del node["$ref"]
            node.update(definition)
        for child in node.values():
            _inline(child, reference, definition)
    elif isinstance(node, list):
        for child in node:
            _inline(child, reference, definition)
