"""What bodies of other APIs than OpenAI's chat have in common: each stands for a chat body.

A dialect's own fields are translated, and the checks of the chat do the rest, so that no check
exists twice. Fields of the chat that a dialect does not spell otherwise may be sent, too: those of
sampling, for example.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.api.chat import ChatRequest, chat_of
from services.gateway.api.parameters import (
    UNKNOWN_PARAMETER,
    Policy,
    UnknownFields,
    known_fields,
)
from services.gateway.vocabulary.errors import BadRequest, GatewayError

_QUOTED_NAME = re.compile(r"'([a-z_]+)'")
_QUOTED_PLACE = re.compile(r"'([a-z_]+)(?:\.[^' ]*)?'")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The fields of a dialect's body.

    `own` are those that it translates. `names` tells what it calls fields of the chat, and `absent`
    are fields of the chat that it has under no name: both are unknown by their names of the chat.
    """

    own: frozenset[str]
    policy: Policy
    names: Mapping[str, str]
    absent: frozenset[str]

    @property
    def passed_on(self) -> frozenset[str]:
        """Fields of the chat that the dialect has under the same name."""
        return frozenset(ChatRequest.model_fields) - self.names.keys() - self.absent - self.own

    def split(
        self, data: Mapping[str, Any], unknown: UnknownFields
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its own fields, and those of the chat; without what asks for nothing.

        Raises:
            BadRequest: see `known_fields`.
        """
        known = known_fields(data, self.own | self.passed_on, self.policy, unknown)
        own = {name: value for name, value in known.items() if name in self.own}
        return own, {name: value for name, value in known.items() if name not in own}

    def chat(self, fields: Mapping[str, Any], unknown: UnknownFields) -> ChatRequest:
        """The chat that a body stands for; errors are told by the names that the client used.

        Raises:
            BadRequest: if a field is wrong.
        """
        try:
            return chat_of(fields, unknown)
        except BadRequest as error:
            # Where inside of a field it is wrong is left out: the dialect has other places.
            message = _QUOTED_PLACE.sub(self._exchanged, error.message)
            param = error.param and self.names.get(error.param.partition(".")[0], error.param)
            raise type(error)(message, param=param, code=error.code) from None

    def renamed(self, error: GatewayError) -> tuple[str, str | None]:
        """Message and field of an error from the chat's checks, by the client's names."""
        if error.code == UNKNOWN_PARAMETER:
            # The name that the client used was the wrong one.
            return error.message, error.param
        message = _QUOTED_NAME.sub(self._exchanged, error.message)
        return message, error.param and self.names.get(error.param, error.param)

    def _exchanged(self, match: re.Match[str]) -> str:
        name = self.names.get(match[1])
        return match[0] if name is None else f"'{name}'"
