"""Finds references in JSON schemas that lead to no schema or to no finite value.

llguidance accepts such schemas, unless the first character of the output depends on the reference.
"""

from collections.abc import Mapping
from typing import Any

from services.gateway.structure.unenforced import Node, nodes


def reference_fault(schema: Node) -> str | None:
    """Describe the first reference that cannot be followed, with its place; None without any.

    A reference may be recursive, but some value of the whole schema must be finite.
    """
    places = list(nodes(schema))
    references = [(path, node) for path, node in places if isinstance(node.get("$ref"), str)]
    for path, node in references:
        if (fault := _fault(schema, node)) is not None:
            return f"{path}.$ref {fault}"
    finite = _finite_nodes(schema, [node for _, node in places])
    if id(schema) in finite:
        return None
    endless = (path for path, node in references if id(node) not in finite)
    return next((f"{path}.$ref requires itself without an end" for path in endless), None)


def _fault(schema: Node, node: Any) -> str | None:
    """Why following `$ref` from the node, and from there, leads to no schema."""
    followed: set[str] = set()
    while isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
        if reference in followed:
            return "refers to itself"
        followed.add(reference)
        # Anchors are left to llguidance.
        if not _is_pointer(reference):
            return None
        if (node := _resolved(schema, reference)) is None:
            return "refers to nothing in the schema"
    return None


def _is_pointer(reference: str) -> bool:
    return reference == "#" or reference.startswith("#/")


def _resolved(schema: Node, reference: str) -> Any:
    """The node at a JSON pointer; None if there is none."""
    node: Any = schema
    for part in reference.removeprefix("#").split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node


def _finite_nodes(schema: Node, all_nodes: list[Node]) -> set[int]:
    """The ids of the nodes that have a finite value, or that other checks refuse."""
    finite: set[int] = set()
    # Inner nodes first: most need a single pass.
    open_nodes = all_nodes[::-1]
    known = {id(node) for node in all_nodes}
    while True:
        still_open = []
        for node in open_nodes:
            needed = _needed(schema, node)
            if all(any(_is_finite(child, finite, known) for child in group) for group in needed):
                finite.add(id(node))
            else:
                still_open.append(node)
        if len(still_open) == len(open_nodes):
            return finite
        open_nodes = still_open


def _is_finite(child: Any, finite: set[int], known: set[int]) -> bool:
    return id(child) not in known or id(child) in finite


def _needed(schema: Node, node: Mapping[str, Any]) -> list[list[Any]]:
    """Groups of schemas; a finite value of the node needs one of each group."""
    groups: list[list[Any]] = []
    reference = node.get("$ref")
    if isinstance(reference, str) and _is_pointer(reference):
        groups.append([_resolved(schema, reference)])
    if isinstance(parts := node.get("allOf"), list):
        groups += ([part] for part in parts)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(alternatives := node.get(keyword), list) and alternatives:
            groups.append(alternatives)
    properties, required = node.get("properties"), node.get("required")
    if node.get("type") == "object" and isinstance(properties, dict) and isinstance(required, list):
        names = filter(lambda name: isinstance(name, str) and name in properties, required)
        groups += ([properties[name]] for name in names)
    least = node.get("minItems")
    if node.get("type") == "array" and isinstance(least, int) and least > 0:
        first = node.get("prefixItems")
        leading = first[:least] if isinstance(first, list) else []
        groups += ([item] for item in leading)
        if least > len(leading):
            groups.append([node.get("items")])
    return groups
