"""Variables that clients may set for the chat template: an allow-list of names and types."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, WithJsonSchema

from services.gateway.api.fields import is_text, refusal
from services.gateway.api.parameters import shown

TEXT_CHARS_MAX = 64

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

VARIABLES: Mapping[str, type] = {
    "clear_thinking": bool,
    "date_string": str,
    "enable_thinking": bool,
    "preserve_thinking": bool,
    "reasoning_effort": str,
    "thinking": bool,
    "thinking_budget": int,
    "tools_in_user_message": bool,
}
"""Names in templates that clients may set, and the types of their values."""
_TYPE_NAMES = {bool: "true or false", int: "an integer", str: f"up to {TEXT_CHARS_MAX} characters"}
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}


def _parse(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal("must be an object")
    for name, item in value.items():
        kind = VARIABLES.get(name)
        if kind is None:
            known = ", ".join(VARIABLES)
            raise refusal(f"may have {known}; '{shown(name)}' is none of them")
        fits = type(item) is kind and (kind is not str or _is_short(str(item)))
        if item is not None and not fits:
            raise refusal(f"must have {_TYPE_NAMES[kind]} as '{name}'")
    return {name: item for name, item in value.items() if item is not None}


def _is_short(value: str) -> bool:
    return is_text(value) and len(value) <= TEXT_CHARS_MAX


TemplateVariables = Annotated[
    Mapping[str, Any],
    PlainValidator(_parse),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        name: {"type": _JSON_TYPES[kind]} for name, kind in VARIABLES.items()
                    },
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]


def template_variables(
    given: Mapping[str, Any], enable_thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """All that is told to the template; what is `given` by name holds.

    An effort of "none" is no thinking, by the names that models have for it.
    """
    told: dict[str, Any] = {}
    if effort is not None:
        told["reasoning_effort"] = effort
    if effort == "none":
        told |= {"enable_thinking": False, "thinking": False}
    if enable_thinking is not None:
        told |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
    return {**told, **given}
