"""Tools of a request, and the choice of tools that may or must be called."""

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
    """A function of the client. `parameters` is the JSON schema of its arguments, an object.

    `strict`: a keyword of the schema that cannot be enforced is an error.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def described(self) -> dict[str, Any]:
        """Return the tool in the OpenAI form that chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = NO_PARAMETERS if self.parameters is None else self.parameters
        return {"type": "function", "function": function}


class CallMode(StrEnum):
    """Whether the model may or must call tools."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that the model may or must call: `names` limits them, None allows all.

    `single`: exactly one call, as OpenAI's clients expect if they name a function.
    """

    mode: CallMode
    names: frozenset[str] | None = None
    single: bool = False
