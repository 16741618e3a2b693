"""Parses tool calls that follow a marker such as <tool_call>, anywhere in the text."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from services.gateway.tools.event import BufferedParser, Content, Event
from services.gateway.tools.json_value import Step


class CallBody(Protocol):
    """Parser of the calls after a marker.

    `index` is the index of the next call, `pending_text` the text without an event yet.
    """

    @property
    def index(self) -> int: ...

    @property
    def pending_text(self) -> str: ...

    def feed(self, text: str, start: int, events: list[Event]) -> tuple[int, Step]:
        """Read `text` from `start` up to the end of the calls, and append to `events`.

        Returns the position after the last character taken, and whether the calls continue (MORE),
        have ended (LAST), or the character at that position is invalid (WRONG). Text that may be
        the beginning of a marker is left unread.
        """

    def end(self, events: list[Event], rest: str = "") -> None:
        """End a call that has begun, because the text ends, after `rest`, or becomes invalid."""


class _DelimitedMode(Enum):
    TEXT = auto()
    BODY = auto()
    CLOSE = auto()


class DelimitedCalls(BufferedParser):
    """Parses calls between markers and omits whitespace around calls. A `Parser`.

    If the text after a marker is not a call, the marker and the text are content. But a call that
    has barely begun directly after another, where the text ends, is omitted.
    """

    def __init__(self, opening: str, closing: str, body: Callable[[int], CallBody]) -> None:
        """`closing`: the marker after a body, which models may omit; "" if the format has none.

        `body` creates the parser of the next body from the index of the next call.
        """
        super().__init__()
        self._opening = opening
        self._closing = closing
        self._new_body = body
        self._mode = _DelimitedMode.TEXT
        self._body = body(0)
        # The marker and the whitespace before it, until a call has begun after it.
        self._lead = ""
        # Whether only whitespace has followed the last call.
        self._after_call = False

    def finish(self) -> list[Event]:
        events: list[Event] = []
        rest = self._buffer.take_rest()
        match self._mode:
            case _DelimitedMode.BODY if self._after_call:
                self._body.end(events, rest)
            case _DelimitedMode.BODY:
                self._reject(events, rest)
            # After a call, the rest is whitespace and the beginning of a marker.
            case _DelimitedMode.TEXT if not self._after_call:
                self._content(rest, events)
        return events

    def _advance(self, events: list[Event]) -> bool:
        match self._mode:
            case _DelimitedMode.TEXT:
                return self._text(events)
            case _DelimitedMode.BODY:
                return self._calls(events)
            case _DelimitedMode.CLOSE:
                return self._close()

    def _text(self, events: list[Event]) -> bool:
        text, marker = self._buffer.read_until(self._opening)
        self._content(text, events)
        if marker is None:
            return False
        self._lead = self._buffer.take_whitespace() + self._opening
        self._body, self._mode = self._new_body(self._body.index), _DelimitedMode.BODY
        return True

    def _calls(self, events: list[Event]) -> bool:
        first = self._body.index
        self._buffer.position, step = self._body.feed(
            self._buffer.text, self._buffer.position, events
        )
        if self._body.index > first:
            self._lead, self._after_call = "", True
        if step is Step.WRONG:
            self._reject(events)
            self._mode = _DelimitedMode.TEXT
        elif step is Step.LAST:
            self._mode = _DelimitedMode.CLOSE if self._closing else _DelimitedMode.TEXT
        return step is not Step.MORE

    def _reject(self, events: list[Event], rest: str = "") -> None:
        """End the body; text without an event becomes content."""
        self._body.end(events)
        self._content(self._lead + self._body.pending_text + rest, events)

    def _close(self) -> bool:
        self._buffer.skip_whitespace()
        closed = self._buffer.read_marker(self._closing)
        if closed is None:
            return False
        if closed:
            self._buffer.take_whitespace()
        self._mode = _DelimitedMode.TEXT
        return True

    def _content(self, text: str, events: list[Event]) -> None:
        if text:
            self._after_call = False
            events.append(Content(text))
