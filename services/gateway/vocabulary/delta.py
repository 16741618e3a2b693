"""A piece of a chat's output, in parts: content, reasoning, calls of tools."""

from dataclasses import dataclass

import msgspec

TOOL_CALLS = "tool_calls"
"""Why an output ended that ended with calls; other reasons are core's."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What was added to call `index`: id and name in its first delta only, then more arguments.

    After the delta that has `ended` nothing more comes of the call.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    ended: bool = False


class Delta(msgspec.Struct, frozen=True):
    """What was added to an answer, in this order: reasoning, content, calls (one delta for each).

    `finish_reason` is set on the last one.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class SaidCall:
    """A call of a tool, as far as it has come."""

    id: str
    name: str
    arguments: str = ""


class Said:
    """All deltas of an answer together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        # The beginning of each call, and the pieces of its arguments.
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.id:
                self._calls.append((call, []))
            self._calls[call.index][1].append(call.arguments)
        self.finish_reason = delta.finish_reason

    @property
    def content(self) -> str:
        """What is said to the user so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """What was thought so far."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[SaidCall]:
        """The calls so far."""
        return [SaidCall(call.id, call.name, "".join(texts)) for call, texts in self._calls]
