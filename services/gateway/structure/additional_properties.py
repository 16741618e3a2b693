"""Adds `additionalProperties: false` to the objects in clients' JSON schemas.

JSON Schema allows properties that a schema does not name, unless `additionalProperties` is false.
A model constrained by such a schema may add properties up to its output limit, and the client's
function does not accept them as arguments. The change only narrows a schema, so every output still
validates against the client's schema.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_ANNOTATIONS = frozenset(
    {
        *("$comment", "$schema", "default", "deprecated", "description", "examples"),
        *("readOnly", "title", "writeOnly"),
    }
)
# Keywords by which the client itself states which unnamed properties are allowed.
_OPEN = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *("dependentRequired", "dependencies"),
    }
)
# With these keywords several schemas apply to a value, and `additionalProperties: false` in one of
# them may forbid properties that another requires.
_COMBINING = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
        *("patternProperties", "dependentSchemas", "dependencies", "const", "enum"),
    }
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_REFERENCES = ("$ref", "$dynamicRef")


def forbid_additional_properties(schema: dict[str, Any]) -> None:
    """Set `additionalProperties` to false, in place, where `schema` leaves it open.

    Objects to which several schemas apply stay open. A schema in which such an object contains a
    reference is not changed at all.
    """
    walk = _Walk(schema)
    nodes = list(walk.sole_schemas())
    # Definitions are shared: closing a definition is safe only if every reference was visited.
    if walk.references == _count_references(schema):
        for node in filter(_closable, nodes):
            node["additionalProperties"] = False


class _Walk:
    """Visits the schemas that are the only schema of their values, definitions included."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.references = 0
        self._root = root
        self._todo: list[Any] = [root]
        self._followed: set[str] = set()

    def sole_schemas(self) -> Iterator[dict[str, Any]]:
        # An explicit stack: a deep schema would exhaust the recursion limit.
        while self._todo:
            node = self._todo.pop()
            if not isinstance(node, dict):
                continue
            if node.keys().isdisjoint(_COMBINING):
                self._visit_children(node)
                yield node
            else:
                self._visit_wrapped(node)

    def _visit_children(self, node: dict[str, Any]) -> None:
        properties = node.get("properties")
        if isinstance(properties, dict):
            self._todo += properties.values()
        self._todo.append(node.get("items"))
        leading = node.get("prefixItems")
        if isinstance(leading, list):
            self._todo += leading

    def _visit_wrapped(self, node: dict[str, Any]) -> None:
        """Visit the schemas that `node` merely refers to or wraps."""
        # `type` requires no properties.
        match [*(node.keys() - _ANNOTATIONS - _DEFINITIONS - {"type"})]:
            case ["$ref"]:
                self._follow(node["$ref"])
            case ["anyOf"] if isinstance(node["anyOf"], list):
                self._todo += node["anyOf"]
            case ["allOf"] if isinstance(node["allOf"], list) and len(node["allOf"]) == 1:
                self._todo += node["allOf"]

    def _follow(self, reference: Any) -> None:
        match reference.split("/") if isinstance(reference, str) else []:
            case ["#"]:
                # The walk begins at the root.
                self.references += 1
                return
            case ["#", "$defs" | "definitions" as kind, name]:
                definitions = self._root.get(kind)
            case _:
                return
        if not isinstance(definitions, dict) or name not in definitions:
            return
        self.references += 1
        if reference not in self._followed:
            self._followed.add(reference)
            self._todo.append(definitions[name])


def _closable(node: Mapping[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required", [])
    return (
        isinstance(properties, dict)
        and isinstance(required, list)
        and all(isinstance(name, str) and name in properties for name in required)
        and node.keys().isdisjoint(_OPEN)
    )


def _count_references(schema: Any) -> int:
    """Count the references anywhere in `schema`."""
    count, todo = 0, [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            count += sum(isinstance(node.get(key), str) for key in _REFERENCES)
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    return count
