"""Removes from JSON schemas what llguidance cannot enforce, and locates errors in schemas.

Runs in the process that checks grammars. A place is a JSONPath: `$.properties.mail.pattern`.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, TypeGuard

from llguidance import LLMatcher

from services.gateway.structure.schema import OPTIONS, compact_json

UNENFORCED = frozenset(
    {
        *("contains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("not", "if", "$dynamicRef", "$recursiveRef", "contentEncoding", "contentMediaType"),
    }
)
"""Keywords that are never enforced."""
SILENT = ("contentEncoding", "contentMediaType")
"""Those that llguidance ignores without a warning."""
COUNTS = frozenset({"minProperties", "maxProperties"})
COUNT_COMPLAINTS = ("min/maxProperties", "minProperties (")
"""Parts of llguidance's messages about counts of properties that it cannot enforce."""
PROBES_MAX = 200
"""Maximum nodes of a schema that are compiled on their own to locate an error."""

# Keywords without an effect of their own: they qualify another keyword, which is reported.
_QUALIFIERS = frozenset(
    {
        *("then", "else", "minContains", "maxContains", "contentSchema"),
        *("$dynamicAnchor", "$recursiveAnchor"),
    }
)
# Values with which a keyword excludes nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
    "not": (False,),
}
_DEPENDENCIES = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})
_SCHEMA_KEYWORDS = ("items", "additionalProperties", "additionalItems")
_LIST_KEYWORDS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPPING_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions")
_DEFINITIONS = ("$defs", "definitions")
_PLAIN_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_URI = re.compile(r":? ?json-schema:\S*")

Node = dict[str, Any]


def remove_unenforced(schema: Node, everywhere: Collection[str] = ()) -> list[str]:
    """Remove, in place, what is not enforced; return the place and reason of each removed part.

    `everywhere`: further keywords to remove wherever they occur. Keywords that exclude no value are
    removed without a report. `oneOf` is enforced as `anyOf` where several alternatives may match;
    it is reported, but stays.
    """
    reports: list[str] = []
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    for path, node in nodes(schema):
        # Qualifiers of these keywords are among those to remove.
        neutral = {keyword for keyword in node if _is_neutral(node, keyword)}
        for keyword in [keyword for keyword in node if keyword != "patternProperties"]:
            if keyword in _QUALIFIERS or keyword in neutral:
                del node[keyword]
            elif keyword in everywhere or keyword in UNENFORCED:
                del node[keyword]
                reports.append(f"{path}.{keyword}")
            elif (reason := _reason(node, keyword, definitions)) is not None:
                if keyword != "oneOf":
                    del node[keyword]
                reports.append(f"{path}.{keyword} ({reason})")
        if "patternProperties" in node:
            reports += _remove_patterns(path, node)
    return reports


def located(schema: Node, error: str) -> str:
    """Describe llguidance's error about `schema`, with the place if a single node causes it."""
    for count, (path, node) in enumerate(nodes(schema)):
        if count < PROBES_MAX and (complaint := _complaint(compact_json(_alone(node)))) is not None:
            return f"{path} ({complaint})"
    if "NoExtensionBias" in error:
        return "no text matches it"
    return _URI.sub("", error)


def regex_reason(error: str) -> str:
    """The reason in llguidance's error about a regular expression; other errors unchanged."""
    # The lines before quote the expression; another kind of error quotes it at its end.
    _, _, reason = error.partition("\nerror: ")
    return (reason or error).partition(" in regex /")[0]


def nodes(schema: Node) -> Iterator[tuple[str, Node]]:
    """The schema and its subschemas with their places; a caller may change a node it has read."""
    # An explicit stack: a deep schema would exhaust the recursion limit.
    todo: list[tuple[str, Any]] = [("$", schema)]
    while todo:
        path, node = todo.pop()
        if isinstance(node, dict):
            yield path, node
            todo += reversed([*_children(path, node)])


def _children(path: str, node: Node) -> Iterator[tuple[str, Any]]:
    for keyword, value in node.items():
        if keyword in _MAPPING_KEYWORDS and isinstance(value, dict):
            yield from ((f"{path}.{keyword}{_step(name)}", child) for name, child in value.items())
        elif keyword in _LIST_KEYWORDS and isinstance(value, list):
            yield from ((f"{path}.{keyword}[{i}]", child) for i, child in enumerate(value))
        elif keyword in _SCHEMA_KEYWORDS:
            yield f"{path}.{keyword}", value


def _step(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return f".{name}"
    # JSONPath has the escapes of JSON, but for the quotes.
    escaped = json.dumps(name, ensure_ascii=False)[1:-1].replace('\\"', '"').replace("'", "\\'")
    return f"['{escaped}']"


def _is_neutral(node: Node, keyword: str) -> bool:
    """Whether the keyword excludes no value that the rest of the node permits."""
    value = node[keyword]
    if keyword == "if":
        return all(node.get(branch, True) in (True, {}) for branch in ("then", "else"))
    if keyword == "contains":
        return node.get("minContains") == 0 and "maxContains" not in node
    if keyword in _DEPENDENCIES and isinstance(value, dict):
        return all(needed in (True, {}, []) for needed in value.values())
    if keyword not in COUNTS or type(value) is not int:
        return value in _NEUTRAL.get(keyword, ())
    if keyword == "minProperties":
        return value <= len(_names(node, "required"))
    closed = node.get("additionalProperties") is False and "patternProperties" not in node
    return closed and len(_names(node, "properties")) <= value


def _names(node: Node, keyword: str) -> set[str]:
    """The names of properties in an object or a list."""
    names = node.get(keyword)
    return {*filter(_is_text, names)} if isinstance(names, Iterable) else set()


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str)


def _reason(node: Node, keyword: str, definitions: Node) -> str | None:
    """Why a keyword with this value cannot be enforced; None if it can."""
    value = node[keyword]
    if keyword in COUNTS:
        # Optional properties make counts hard; llguidance enforces some and misjudges others.
        alone = _alone(node) | {"properties": {name: {} for name in _names(node, "properties")}}
        if node.get("additionalProperties") is False:
            alone["additionalProperties"] = False
        return "there are optional properties" if _complaint(compact_json(alone)) else None
    if keyword == "$schema":
        return "unknown dialect" if _complaint(compact_json({keyword: value})) else None
    if keyword in ("pattern", "format") and isinstance(value, str):
        return _complaint(compact_json({"type": "string", keyword: value}))
    if keyword == "oneOf":
        complaint = _complaint(compact_json({**definitions, "oneOf": value})) or ""
        return "several may match" if complaint.startswith("oneOf") else None
    return None


def _remove_patterns(path: str, node: Node) -> list[str]:
    """Remove patterns of names that cannot be enforced; return the reports."""
    patterns, reports = node["patternProperties"], []
    for name in [*patterns] if isinstance(patterns, dict) else ():
        reason = _complaint(compact_json({"type": "string", "pattern": name}))
        if reason is not None:
            del patterns[name]
            reports.append(f"{path}.patternProperties{_step(name)} ({reason})")
    # It would exclude the properties whose names match.
    if reports and node.pop("additionalProperties", True) is not True:
        reports.append(f"{path}.additionalProperties")
    return reports


@cache
def _complaint(schema: str) -> str | None:
    """llguidance's first error or warning about a schema; None without any."""
    source = LLMatcher.grammar_from_json_schema(
        compact_json({**json.loads(schema), OPTIONS: {"lenient": True}})
    )
    _, messages = LLMatcher.validate_grammar_with_warnings(source, None)
    return regex_reason(messages[0]) if messages else None


def _alone(node: Node) -> Node:
    """The node without its subschemas and without references, which are valid only in context."""
    inner: dict[str, type] = {"$ref": str}
    inner |= dict.fromkeys(_MAPPING_KEYWORDS, dict) | dict.fromkeys(_LIST_KEYWORDS, list)
    return {
        keyword: value
        for keyword, value in node.items()
        if not (value and isinstance(value, inner.get(keyword, ())))
        and not (keyword in _SCHEMA_KEYWORDS and isinstance(value, (dict, bool)))
    }
