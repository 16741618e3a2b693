"""The format of Llama 3: the whole text is `{"name": …, "parameters": {…}}`."""

from collections.abc import Container
from enum import Enum, auto

from services.gateway.tools.call_list import CallList
from services.gateway.tools.event import Content, Event
from services.gateway.tools.json_value import Step

TAG = "<|python_tag|>"
SEPARATOR = ";"
# What else stands in such objects. JSON with other keys is an answer and no call.
_OTHER_KEYS = frozenset({"type", "id"})
_BLANKS = " \t\r\n"


class _Mode(Enum):
    LEAD = auto()
    CALL = auto()
    BETWEEN = auto()
    TEXT = auto()


class Llama3JsonCalls:
    """Text that is a call from its beginning, with or without the tag, or else is no call.

    Further calls may follow after a semicolon.
    """

    def __init__(self, names: Container[str]) -> None:
        """`names`: of the tools that may be called."""
        self._names = names
        self._mode = _Mode.LEAD
        self._buffer = ""
        # What stands before a call that has not begun.
        self._lead = ""
        self._call = CallList(names, 0, _OTHER_KEYS)

    def push(self, text: str) -> list[Event]:
        """See Parser."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """See Parser."""
        events: list[Event] = []
        if self._mode is _Mode.CALL:
            self._break(events)
        elif self._mode is not _Mode.BETWEEN:
            _content(self._lead + self._buffer, events)
        self._buffer = ""
        return events

    def _advance(self, events: list[Event]) -> bool:
        """Take some of the buffer; False if it needs more text."""
        match self._mode:
            case _Mode.LEAD:
                return self._before(events)
            case _Mode.CALL:
                return self._in_call(events)
            case _Mode.BETWEEN:
                return self._between()
            case _Mode.TEXT:
                _content(self._buffer, events)
                self._buffer = ""
                return False

    def _before(self, events: list[Event]) -> bool:
        rest = self._buffer.lstrip(_BLANKS)
        if TAG.startswith(rest):
            return self._tag(rest)
        if rest.startswith(TAG):
            rest = rest.removeprefix(TAG)
        elif not rest.startswith("{"):
            self._mode = _Mode.TEXT
            return True
        self._lead += self._buffer.removesuffix(rest)
        self._buffer, self._mode = rest, _Mode.CALL
        return True

    def _tag(self, rest: str) -> bool:
        """The buffer is the tag or the beginning of it."""
        if rest != TAG:
            return False
        self._lead, self._buffer, self._mode = self._buffer, "", _Mode.CALL
        return True

    def _in_call(self, events: list[Event]) -> bool:
        first = self._call.index
        count, step = self._call.feed(self._buffer, events)
        self._buffer = self._buffer[count:]
        if self._call.index > first:
            self._lead = ""
        if step is Step.WRONG:
            self._break(events)
            self._mode = _Mode.TEXT
        elif step is Step.LAST:
            self._mode = _Mode.BETWEEN
        return step is not Step.MORE

    def _break(self, events: list[Event]) -> None:
        self._call.end(events)
        _content(self._lead + self._call.undecided, events)
        self._lead = ""

    def _between(self) -> bool:
        rest = self._buffer.lstrip(_BLANKS)
        if not rest:
            return False
        if rest.startswith(SEPARATOR):
            after = rest.removeprefix(SEPARATOR)
            self._lead = self._buffer.removesuffix(after)
            self._buffer, self._mode = after, _Mode.CALL
            self._call = CallList(self._names, self._call.index, _OTHER_KEYS)
        else:
            self._mode = _Mode.TEXT
        return True


def _content(text: str, events: list[Event]) -> None:
    if text:
        events.append(Content(text))
