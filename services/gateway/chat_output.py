"""From a chat's text to what it says: reasoning, content and calls of tools."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from services.core.request import FinishReason
from services.gateway.chat_form import ChatForm
from services.gateway.delta import TOOL_CALLS, Delta, ToolCallDelta
from services.gateway.output import Piece
from services.gateway.tools.event import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Parser,
    Reasoning,
)
from services.gateway.tools.format import Thinking, ToolFormat, tool_parser
from services.gateway.tools.reasoning import ReasoningSplit


def call_id(form: ToolFormat) -> str:
    """A new id of a call; templates of Mistral take only such of nine letters and digits."""
    if form is ToolFormat.MISTRAL:
        return secrets.token_hex(5)[:9]
    return f"call_{secrets.token_hex(12)}"


class ChatOutput:
    """Reads the text of one choice while it comes."""

    def __init__(self, form: ChatForm, new_id: Callable[[ToolFormat], str] = call_id) -> None:
        self._form = form
        self._new_id = new_id
        self._split = None if form.thinking is None else ReasoningSplit(_opened(form.thinking))
        self._calls: Parser | None = None
        if form.names:
            self._calls = tool_parser(form.tool_format, form.names)
        self._called = False

    def push(self, piece: Piece) -> Piece:
        """The piece with its delta."""
        last = piece.finish_reason is not None
        events = self._read(piece.text)
        cut = self._finish() if last else []
        reason: str | None = piece.finish_reason
        delta = self._delta([*events, *cut])
        stopped = piece.finish_reason is FinishReason.STOP
        if stopped and self._called and not any(isinstance(event, CallEnd) for event in cut):
            reason = TOOL_CALLS
        return replace(piece, delta=replace(delta, finish_reason=reason))

    def _read(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._content(self._split.push(text) if self._split else [Content(text)])

    def _finish(self) -> list[Event]:
        """What was held back; calls that end here were cut short."""
        events = self._content(self._split.finish()) if self._split else []
        return events + (self._calls.finish() if self._calls is not None else [])

    def _content(self, events: list[Event]) -> list[Event]:
        """The events with calls found in the content."""
        if self._calls is None:
            return events
        found: list[Event] = []
        for event in events:
            found += self._calls.push(event.text) if isinstance(event, Content) else [event]
        return found

    def _delta(self, events: Iterable[Event]) -> Delta:
        content, reasoning = "", ""
        calls: dict[int, ToolCallDelta] = {}
        for event in events:
            match event:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text if self._form.include_reasoning else ""
                case CallBegin(index, name):
                    self._called = True
                    new_id = self._new_id(self._form.tool_format)
                    calls[index] = ToolCallDelta(index, new_id, name)
                case CallArguments(index, text):
                    call = calls.get(index, ToolCallDelta(index))
                    calls[index] = replace(call, arguments=call.arguments + text)
                case CallEnd(index):
                    calls[index] = replace(calls.get(index, ToolCallDelta(index)), ended=True)
        return Delta(content, reasoning, tuple(calls.values()))


def _opened(thinking: Thinking) -> bool:
    return thinking is Thinking.OPENED
