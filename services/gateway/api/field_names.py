"""Translates field names in errors of chats and completions to those of other APIs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.gateway.api.parameters import UNKNOWN_PARAMETER
from services.gateway.vocabulary.errors import GatewayError

# A field in an error message, or the path of a field. Values are in double quotes.
_QUOTED = re.compile(r"'([a-z_]+(?:\.\w+)*)'")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """An API's names of fields.

    `names`: the API's name, or path, by that of the chat or completion. `texts`: the API's form of
    other texts in messages and paths.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)

    def translated(self, error: GatewayError) -> tuple[str, str | None]:
        """The message and the `param` of an error."""
        if error.code == UNKNOWN_PARAMETER:
            # The error quotes the client's own field name.
            return error.message, error.param
        message, param = error.message, error.param or ""
        for text, own in self.texts.items():
            message, param = message.replace(text, own), param.replace(text, own)
        message = _QUOTED.sub(lambda match: f"'{self._own(match[1])}'", message)
        return message, self._own(param) or None

    def _own(self, path: str) -> str:
        """The path with its longest part that has another name replaced."""
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            own = self.names.get(".".join(parts[:end]))
            if own is not None:
                return ".".join([own, *parts[end:]])
        return path


SAME_NAMES = FieldNames()
"""The names of chats and completions."""
