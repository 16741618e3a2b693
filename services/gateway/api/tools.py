"""The fields `tools` and `tool_choice`: parsers and JSON schemas."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.api.fields import is_text, refusal
from services.gateway.structure.schema import check_schema
from services.gateway.tools.tool import CallMode, Tool, ToolChoice
from services.gateway.vocabulary.errors import NotSupported

TOOLS_MAX = 128
TOOL_FORM = "{'type': 'function', 'function': {…}}"
CHOICE_FORM = "{'type': 'function', 'function': {'name': …}}"
"""The value of `tool_choice` that names a function."""
NAME_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"

_NAME = re.compile(NAME_PATTERN)
_MODES = {mode.value for mode in CallMode}


def _parse_tools(value: Any) -> tuple[Tool, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > TOOLS_MAX:
        raise refusal(f"must be a list of up to {TOOLS_MAX} tools")
    tools = tuple(map(_parse_tool, value))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise refusal(f'must have unique names; "{twice}" is duplicate')
    return tools


def _parse_tool(value: Any) -> Tool:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if isinstance(kind, str) and kind != "function":
        raise NotSupported(
            f"tools of type {kind[:64]!a} are not supported yet; declare functions and run them at"
            " the client",
            param="tools",
        )
    function = value.get("function") if kind == "function" else None
    if not isinstance(function, Mapping):
        raise refusal(f"must hold tools of the form {TOOL_FORM}")
    name, description = function.get("name"), function.get("description")
    parameters, strict = function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refusal("must have names of up to 64 letters, digits, _ and -")
    if description is not None and not is_text(description):
        raise refusal(f'must have text as the description of "{name}"')
    if parameters is not None and not isinstance(parameters, Mapping):
        raise refusal(f'must have a JSON schema as the parameters of "{name}"')
    if strict is not None and not isinstance(strict, bool):
        raise refusal(f"must have true or false as 'strict' of \"{name}\"")
    if parameters is not None:
        check_schema(parameters, "tools")
    return Tool(name, description, parameters, bool(strict))


def _parse_choice(value: Any) -> ToolChoice | None:
    """Parse a mode, a function that must be called, or a list of allowed functions."""
    if value is None:
        return None
    if isinstance(value, str) and value in _MODES:
        return ToolChoice(CallMode(value))
    kind = value.get("type") if isinstance(value, Mapping) else None
    match kind:
        case "function":
            return ToolChoice(CallMode.REQUIRED, frozenset({_function_name(value)}), single=True)
        case "allowed_tools":
            return _allowed(value.get("allowed_tools"))
    raise refusal(f"must be 'none', 'auto', 'required' or {CHOICE_FORM}")


def _allowed(value: Any) -> ToolChoice:
    mode = value.get("mode") if isinstance(value, Mapping) else None
    tools = value.get("tools") if isinstance(value, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise refusal("must have a mode ('auto' or 'required') and a list of tools")
    return ToolChoice(CallMode(mode), frozenset(map(_function_name, tools)))


def _function_name(value: Any) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refusal(f"must name a function: {CHOICE_FORM}")
    return name


def _function_schema(**more: Any) -> dict[str, Any]:
    """The schema of a function with a name and further properties."""
    properties = {"name": {"type": "string", "pattern": NAME_PATTERN}, **more}
    function = {"type": "object", "required": ["name"], "properties": properties}
    return {
        "type": "object",
        "required": ["type", "function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }


_NAMED = _function_schema()
_TOOL = _function_schema(
    description={"type": "string"}, parameters={"type": "object"}, strict={"type": "boolean"}
)
Tools = Annotated[
    tuple[Tool, ...],
    PlainValidator(_parse_tools),
    WithJsonSchema(
        {"anyOf": [{"type": "array", "maxItems": TOOLS_MAX, "items": _TOOL}, {"type": "null"}]}
    ),
]
Choice = Annotated[
    ToolChoice | None,
    PlainValidator(_parse_choice),
    WithJsonSchema({"anyOf": [{"enum": sorted(_MODES)}, _NAMED, {"type": "null"}]}),
]
