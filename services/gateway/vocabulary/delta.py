"""Deltas of a chat's answer: increments of its content, reasoning and tool calls."""

from dataclasses import dataclass

import msgspec

TOOL_CALLS = "tool_calls"
"""Finish reason of an output that ends with tool calls; other reasons are `FinishReason`s."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A delta of call `index`: id and name are set in its first delta only.

    The delta with `ended` is the last of the call; `truncated`: the call ended incomplete.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    ended: bool = False
    truncated: bool = False


class Delta(msgspec.Struct, frozen=True):
    """A delta of an answer; its parts follow in the order reasoning, content, calls.

    `tool_calls` has at most one entry per call. `finish_reason` is set in the last delta.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class AccumulatedCall:
    """A tool call as far as it has been received."""

    id: str
    name: str
    arguments: str = ""


class AnswerAccumulator:
    """Accumulates the deltas of an answer."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        # First delta of each call, and the pieces of the call's arguments.
        self._calls: list[tuple[ToolCallDelta, list[str]]] = []
        self.finish_reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self._content.append(delta.content)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            # Only the first delta of a call has an id.
            if call.id:
                self._calls.append((call, []))
            self._calls[call.index][1].append(call.arguments)
        self.finish_reason = delta.finish_reason

    @property
    def content(self) -> str:
        """Content so far."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """Reasoning so far."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[AccumulatedCall]:
        """Calls so far."""
        return [AccumulatedCall(call.id, call.name, "".join(texts)) for call, texts in self._calls]
