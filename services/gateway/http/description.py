"""Builds OpenAPI descriptions for routes that parse their bodies without FastAPI."""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from pydantic import BaseModel

from services.gateway.api.chat import ChatRequest
from services.gateway.api.parameters import Policy

_ERROR = {
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

_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "schema": {"type": "string", "maxLength": 257},
    "description": "A repeated request with the same key and body receives the same response.",
}


def describe_body(
    kind: type[BaseModel],
    policy: Policy | None = None,
    passed_on: Collection[str] = (),
    error: Mapping[str, Any] = _ERROR,
) -> dict[str, Any]:
    """The `openapi_extra` of a route: request body and errors.

    `policy`: accepted but ignored fields; None for routes that generate nothing. `passed_on`: names
    of fields of /v1/chat/completions that the body may have. `error`: schema of error responses.
    """
    schema = _schema(kind)
    if passed_on:
        chat = _schema(ChatRequest)["properties"]
        schema["properties"] |= {name: chat[name] for name in chat if name in passed_on}
    # By default unknown fields are ignored, not refused.
    schema.pop("additionalProperties", None)
    for ignored, why in (policy.ignored if policy is not None else {}).items():
        schema["properties"][ignored] = {"description": f"Ignored: {why}."}
    refusal = {
        "description": "An error; the message states the cause and the remedy.",
        "content": {"application/json": {"schema": error}},
    }
    content = {"application/json": {"schema": schema}}
    return {
        "parameters": [] if policy is None else [_KEY],
        "requestBody": {"required": True, "content": content},
        "responses": {"4XX": refusal, "5XX": refusal},
    }


def _schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The schema of `kind` without references."""
    schema = _generated(kind)
    alone = {name: child for name, child in schema.items() if name != "$defs"}
    inlined: dict[str, Any] = _inlined(alone, schema.get("$defs", {}))
    return inlined


@cache
def _generated(kind: type[BaseModel]) -> dict[str, Any]:
    """Pydantic's schema of `kind`. Cached, as it takes 10 to 40 ms and several routes need it."""
    return kind.model_json_schema()


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """`node` with references replaced by their definitions."""
    if isinstance(node, list):
        return [_inlined(child, definitions) for child in node]
    if not isinstance(node, dict):
        return node
    # Drop discriminators, whose mappings refer to the definitions.
    node = {name: child for name, child in node.items() if name != "discriminator"}
    if isinstance(reference := node.get("$ref"), str):
        del node["$ref"]
        node = definitions[reference.rpartition("/")[2]] | node
    return {name: _inlined(child, definitions) for name, child in node.items()}
