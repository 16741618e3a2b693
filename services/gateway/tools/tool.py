"""The tools of a request, and which of them may or must be called."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function of the client. `parameters` is the JSON schema of its arguments, an object's.

    `strict`: what of the schema cannot be enforced is an error.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """As templates take it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = NO_PARAMETERS if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


class CallMode(StrEnum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools are called; `names` are those that may be, None for all.

    `single`: exactly one call, as OpenAI's clients expect of a function that they name.
    """

    mode: CallMode
    names: frozenset[str] | None = None
    single: bool = False
