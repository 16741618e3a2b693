"""Parses the tool calls of Llama 3: the whole output is `{"name": …, "parameters": {…}}`."""

from collections.abc import Container
from enum import Enum, auto

from services.gateway.tools.call_list import CallList
from services.gateway.tools.event import BufferedParser, Content, Event
from services.gateway.tools.json_value import Step

TAG = "<|python_tag|>"
SEPARATOR = ";"
# Further keys that a call object may have. JSON with any other key is content, not a call.
_OTHER_KEYS = frozenset({"type", "id"})


class _Llama3Mode(Enum):
    LEAD = auto()
    CALL = auto()
    BETWEEN = auto()
    TEXT = auto()


class Llama3JsonCalls(BufferedParser):
    """Parses output that begins with a call, after optional whitespace and an optional tag.

    Any other output is content. Further calls may follow after a semicolon. A `Parser`.
    """

    def __init__(self, names: Container[str]) -> None:
        """`names`: names of the tools that may be called."""
        super().__init__()
        self._names = names
        self._mode = _Llama3Mode.LEAD
        # Tag or separator before the call, which becomes content if no call follows.
        self._lead = ""
        # Parser of the current or last call.
        self._calls = CallList(names, 0, _OTHER_KEYS)

    def finish(self) -> list[Event]:
        events: list[Event] = []
        rest = self._buffer.take_rest()
        if self._mode is _Llama3Mode.CALL and self._calls.index:
            # Omit a further call that has barely begun.
            self._calls.end(events)
        elif self._mode is _Llama3Mode.CALL:
            self._reject(events)
        elif self._mode is not _Llama3Mode.BETWEEN:
            _content(rest, events)
        return events

    def _advance(self, events: list[Event]) -> bool:
        match self._mode:
            case _Llama3Mode.LEAD:
                return self._start()
            case _Llama3Mode.CALL:
                return self._read_call(events)
            case _Llama3Mode.BETWEEN:
                return self._read_separator()
            case _Llama3Mode.TEXT:
                _content(self._buffer.take_rest(), events)
                return False

    def _start(self) -> bool:
        buffer = self._buffer
        buffer.skip_whitespace()
        tagged = buffer.read_marker(TAG)
        if tagged is None:
            return False
        if tagged or buffer.text[buffer.position] == "{":
            self._lead = buffer.take_whitespace() + (TAG if tagged else "")
            self._mode = _Llama3Mode.CALL
        else:
            self._mode = _Llama3Mode.TEXT
        return True

    def _read_call(self, events: list[Event]) -> bool:
        first = self._calls.index
        self._buffer.position, step = self._calls.feed(
            self._buffer.text, self._buffer.position, events
        )
        if self._calls.index > first:
            # The call has begun, so its tag or separator is not content.
            self._lead = ""
        if step is Step.WRONG:
            self._reject(events)
            self._mode = _Llama3Mode.TEXT
        elif step is Step.LAST:
            self._mode = _Llama3Mode.BETWEEN
        return step is not Step.MORE

    def _reject(self, events: list[Event]) -> None:
        """End the call; text without an event becomes content."""
        self._calls.end(events)
        _content(self._lead + self._calls.pending_text, events)
        self._lead = ""

    def _read_separator(self) -> bool:
        self._buffer.skip_whitespace()
        separated = self._buffer.read_marker(SEPARATOR)
        if separated is None:
            return False
        if separated:
            self._lead = self._buffer.take_whitespace() + SEPARATOR
            self._mode = _Llama3Mode.CALL
            self._calls = CallList(self._names, self._calls.index, _OTHER_KEYS)
        else:
            self._mode = _Llama3Mode.TEXT
        return True


def _content(text: str, events: list[Event]) -> None:
    if text:
        events.append(Content(text))
