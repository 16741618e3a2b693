"""Objects in schemas of clients take no properties but those that the schema names.

JSON Schema allows others wherever it does not forbid them. A model that is held to such a schema
may write properties of its own until its output is cut, and a function of the client cannot take
them as arguments. An open object takes all that a closed one takes, so every output validates.
"""

from collections.abc import Iterator, Mapping
from typing import Any

_ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
)
# In these a schema speaks of properties that it does not name, or asks for them.
_OPEN = frozenset(
    {
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "minProperties"),
        *("dependentRequired", "dependencies"),
    }
)
# Beside these a value has to follow several schemas, and one may ask for what another forbids.
_JOINED = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$dynamicRef"),
        *("patternProperties", "dependentSchemas", "dependencies", "const", "enum"),
    }
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_REFERENCES = ("$ref", "$dynamicRef")


def close_objects(schema: dict[str, Any]) -> None:
    """Set `additionalProperties` to false where `schema` does not say and that only narrows it.

    Nothing is set in a schema with a reference from a place where several schemas hold.
    """
    walk = _Walk(schema)
    nodes = list(walk.alone())
    if walk.references == _count_references(schema):
        for node in filter(_closable, nodes):
            node["additionalProperties"] = False


class _Walk:
    """Through the schemas that alone hold for their place, definitions included."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.references = 0
        self._root = root
        self._todo: list[Any] = [root]
        self._followed: set[str] = set()

    def alone(self) -> Iterator[dict[str, Any]]:
        while self._todo:
            node = self._todo.pop()
            if not isinstance(node, dict):
                continue
            if node.keys().isdisjoint(_JOINED):
                self._go_into(node)
                yield node
            else:
                self._pass_on(node)

    def _go_into(self, node: dict[str, Any]) -> None:
        properties = node.get("properties")
        if isinstance(properties, dict):
            self._todo += properties.values()
        self._todo.append(node.get("items"))
        leading = node.get("prefixItems")
        if isinstance(leading, list):
            self._todo += leading

    def _pass_on(self, node: dict[str, Any]) -> None:
        """To what alone holds for a place that the node itself says nothing about."""
        match [*(node.keys() - _ANNOTATIONS - _DEFINITIONS)]:
            case ["$ref"]:
                self._follow(node["$ref"])
            case ["anyOf"] if isinstance(node["anyOf"], list):
                self._todo += node["anyOf"]
            case ["allOf"] if isinstance(node["allOf"], list) and len(node["allOf"]) == 1:
                self._todo += node["allOf"]

    def _follow(self, reference: Any) -> None:
        match reference.split("/") if isinstance(reference, str) else []:
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
    """All references, wherever they stand."""
    count, todo = 0, [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            count += sum(isinstance(node.get(key), str) for key in _REFERENCES)
            todo += node.values()
        elif isinstance(node, list):
            todo += node
    return count
