"""Parses the output text of a chat choice into reasoning, content and tool calls.

The parsers of services.gateway.tools turn text into events; `ChatOutput` turns events into deltas,
the increments of a message in the OpenAI chat API.
"""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from msgspec import structs

from services.core.request import FinishReason
from services.gateway.serving.output import OutputPiece
from services.gateway.tools.event import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parser,
    Reasoning,
)
from services.gateway.tools.format import (
    ChatForm,
    Thinking,
    ToolFormat,
    reasoning_ends,
    tool_parser,
)
from services.gateway.tools.harmony import HarmonyParser
from services.gateway.tools.reasoning import ReasoningSplit
from services.gateway.vocabulary.delta import TOOL_CALLS, Delta, ToolCallDelta


def call_id(form: ToolFormat) -> str:
    """A new tool call id; Mistral's templates accept only ids of nine letters and digits."""
    if form is ToolFormat.MISTRAL:
        return secrets.token_hex(5)[:9]
    return f"call_{secrets.token_hex(12)}"


class ChatOutput:
    """Incremental parser for the text of a chat choice."""

    def __init__(self, form: ChatForm, new_id: Callable[[ToolFormat], str] = call_id) -> None:
        self._form = form
        self._new_id = new_id
        self._split: Parser | None = None
        self._calls: Parser | None = None
        if form.tool_format is ToolFormat.HARMONY:
            # Reasoning and calls are messages of the same format.
            self._split = HarmonyParser(form.names, form.thinking is Thinking.OPENED)
        else:
            self._choose_parsers(form)
        self._called = False  # whether the output has a complete tool call
        self._ids: set[str] = set()

    def _choose_parsers(self, form: ChatForm) -> None:
        if form.thinking is not None:
            ends = tuple(reasoning_ends(form.tool_format)) if form.names else ()
            self._split = ReasoningSplit(form.thinking is Thinking.OPENED, form.marks, ends)
        if form.names:
            self._calls = tool_parser(form.tool_format, form.names, form.types)

    def push(self, piece: OutputPiece) -> list[OutputPiece]:
        """Parse a piece; returns it with its delta, split if a delta cannot express the order.

        Of several pieces, the first has the tokens and the last has the finish reason.
        """
        last = piece.finish_reason is not None
        events = self._read(piece.text)
        flushed = self._finish() if last else []
        deltas = [self._delta(group) for group in self._grouped([*events, *flushed])]
        reason: str | None = piece.finish_reason
        # A truncated call is none to run: with no complete call the finish reason stays `stop`.
        if piece.finish_reason is FinishReason.STOP and self._called:
            reason = TOOL_CALLS
        deltas[-1] = structs.replace(deltas[-1], finish_reason=reason)
        if len(deltas) == 1:
            return [structs.replace(piece, delta=deltas[0])]
        first = structs.replace(piece, delta=deltas[0], finish_reason=None, stop_reason=None)
        ending = OutputPiece("", (), piece.finish_reason, piece.stop_reason, delta=deltas[-1])
        return [first, *(OutputPiece("", delta=delta) for delta in deltas[1:-1]), ending]

    def _read(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._content(self._split.push(text) if self._split else [Content(text)])

    def _finish(self) -> list[Event]:
        """Flush the parsers."""
        events = self._content(self._split.finish()) if self._split else []
        return events + (self._calls.finish() if self._calls is not None else [])

    def _content(self, events: list[Event]) -> list[Event]:
        """The events, with tool calls extracted from the content."""
        if self._calls is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return parsed

    def _grouped(self, events: Iterable[Event]) -> list[list[Event]]:
        """The events in as few groups as deltas can express in order; at least one group."""
        groups: list[list[Event]] = [[]]
        latest = 0
        for event in events:
            if isinstance(event, Reasoning) and not self._form.include_reasoning:
                continue
            # Within a delta, clients read reasoning, content and calls in this order.
            if (position := _position(event)) < latest:
                groups.append([])
            groups[-1].append(event)
            latest = position
        return groups

    def _delta(self, events: Iterable[Event]) -> Delta:
        texts: dict[type[Event], list[str]] = {Content: [], Reasoning: []}
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case Content(text) | Reasoning(text):
                    texts[type(event)].append(text)
                case CallBegin(index, name, own_id):
                    calls[index] = ToolCallDelta(index, self._id_of(own_id), name)
                case CallArguments(index, text):
                    call = calls.get(index, ToolCallDelta(index))
                    calls[index] = replace(call, arguments=call.arguments + text)
                case CallEnd(index, complete):
                    self._called |= complete
                    call = calls.get(index, ToolCallDelta(index))
                    calls[index] = replace(call, ended=True, truncated=not complete)
        return Delta("".join(texts[Content]), "".join(texts[Reasoning]), tuple(calls.values()))

    def _id_of(self, own_id: str) -> str:
        """The id that the model gave a call, or a new id if it gave none or repeated it."""
        if not own_id or own_id in self._ids:
            return self._new_id(self._form.tool_format)
        self._ids.add(own_id)
        return own_id


def _position(event: Event) -> int:
    """The position of an event among the fields of a Delta: reasoning, content, calls."""
    match event:
        case Reasoning():
            return 0
        case Content():
            return 1
        case _:
            return 2
