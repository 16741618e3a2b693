"""Parses Mistral's tool calls: `[TOOL_CALLS][{…}, {…}]`, and newer `[TOOL_CALLS]name[ARGS]{…}`."""

from collections.abc import Container

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.call_list import CallList
from services.gateway.tools.delimited_calls import CallBody, DelimitedCalls
from services.gateway.tools.event import CallArguments, CallBegin, CallEnd, Event
from services.gateway.tools.json_value import JsonValue, Step

OPEN = "[TOOL_CALLS]"
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
HEADER_CHARS_MAX = 256
"""Maximum characters before the arguments: the name and the markers after it."""


def mistral_calls(names: Container[str]) -> DelimitedCalls:
    """Parser of calls of the tools `names`, in either format."""
    return DelimitedCalls(OPEN, "", lambda index: _EitherBody(names, index))


class _EitherBody:
    """Selects the parser by the first character after the marker. A `CallBody`."""

    def __init__(self, names: Container[str], index: int) -> None:
        self._names = names
        self._first = index
        # Whitespace after the marker, which is content if no call follows.
        self._whitespace: list[str] = []
        self._body: CallBody | None = None

    @property
    def index(self) -> int:
        return self._first if self._body is None else self._body.index

    @property
    def pending_text(self) -> str:
        whitespace = "".join(self._whitespace) if self.index == self._first else ""
        return whitespace if self._body is None else whitespace + self._body.pending_text

    def feed(self, text: str, start: int, events: list[Event]) -> tuple[int, Step]:
        while self._body is None:
            if start == len(text):
                return start, Step.MORE
            if text[start] in WHITESPACE:
                self._whitespace.append(text[start])
                start += 1
            else:
                kind = CallList if text[start] in "[{" else _NamedCall
                self._body = kind(self._names, self._first)
        return self._body.feed(text, start, events)

    def end(self, events: list[Event], rest: str = "") -> None:
        if self._body is not None:
            self._body.end(events, rest)


class _NamedCall:
    """Parses a call whose name precedes its arguments. A `CallBody`."""

    def __init__(self, names: Container[str], index: int) -> None:
        self._names = names
        self._arguments: JsonValue | None = None
        self.index = index
        self.pending_text = ""

    def feed(self, text: str, start: int, events: list[Event]) -> tuple[int, Step]:
        if self._arguments is None:
            start, step = self._header(text, start, events)
            if self._arguments is None:
                return start, step
        arguments: list[str] = []
        for index in range(start, len(text)):
            step = self._arguments.push(text[index])
            if step is not Step.WRONG:
                arguments.append(self._arguments.text)
            if step is not Step.MORE:
                self._emit_arguments(arguments, events)
                self._end_call(events, complete=step is Step.LAST)
                return index + (step is Step.LAST), step
        self._emit_arguments(arguments, events)
        return len(text), Step.MORE

    def end(self, events: list[Event], rest: str = "") -> None:
        self._end_call(events, complete=False)

    def _end_call(self, events: list[Event], complete: bool) -> None:
        if self._arguments is not None:
            events.append(CallEnd(self.index - 1, complete))
            self._arguments = None

    def _header(self, text: str, start: int, events: list[Event]) -> tuple[int, Step]:
        """Read the name up to the start of the arguments, where the call begins."""
        for index in range(start, len(text)):
            char = text[index]
            if char == "{":
                # A call id and the [ARGS] marker may follow the name.
                name = self.pending_text.removesuffix(ARGUMENTS).split(CALL_ID)[0].strip()
                if name not in self._names:
                    return index, Step.WRONG
                self.pending_text, self._arguments = "", JsonValue()
                events.append(CallBegin(self.index, name))
                self.index += 1
                return index, Step.MORE
            if len(self.pending_text) == HEADER_CHARS_MAX:
                return index, Step.WRONG
            self.pending_text += char
        return len(text), Step.MORE

    def _emit_arguments(self, arguments: list[str], events: list[Event]) -> None:
        if arguments:
            events.append(CallArguments(self.index - 1, "".join(arguments)))
