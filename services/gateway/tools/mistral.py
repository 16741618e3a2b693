"""The formats of Mistral: `[TOOL_CALLS][{…}, {…}]`, and newer `[TOOL_CALLS]name[ARGS]{…}`."""

from collections.abc import Container

from services.gateway.text.held_text import BLANKS
from services.gateway.tools.call_list import CallList
from services.gateway.tools.event import CallArguments, CallBegin, CallEnd, Event
from services.gateway.tools.json_value import JsonValue, Step
from services.gateway.tools.marked_calls import Body, MarkedCalls

OPEN = "[TOOL_CALLS]"
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
HEADER_CHARS_MAX = 256
"""Longest name with what may stand between it and the arguments."""


def mistral_calls(names: Container[str]) -> MarkedCalls:
    """Finds calls of the tools `names` in either format, any number of times."""
    return MarkedCalls(OPEN, "", lambda index: _EitherBody(names, index))


class _EitherBody:
    """Whichever of the two begins after the mark; a Body."""

    def __init__(self, names: Container[str], index: int) -> None:
        self._names = names
        self._first = index
        self._blanks: list[str] = []
        self._body: Body | None = None

    @property
    def index(self) -> int:
        return self._first if self._body is None else self._body.index

    @property
    def undecided(self) -> str:
        blanks = "".join(self._blanks) if self.index == self._first else ""
        return blanks if self._body is None else blanks + self._body.undecided

    def feed(self, text: str, at: int, events: list[Event]) -> tuple[int, Step]:
        while self._body is None:
            if at == len(text):
                return at, Step.MORE
            if text[at] in BLANKS:
                self._blanks.append(text[at])
                at += 1
            else:
                kind = CallList if text[at] in "[{" else _NamedCall
                self._body = kind(self._names, self._first)
        return self._body.feed(text, at, events)

    def end(self, events: list[Event]) -> None:
        if self._body is not None:
            self._body.end(events)


class _NamedCall:
    """A call whose name stands before its arguments; a Body."""

    def __init__(self, names: Container[str], index: int) -> None:
        self._names = names
        self._arguments: JsonValue | None = None
        self.index = index
        self.undecided = ""

    def feed(self, text: str, at: int, events: list[Event]) -> tuple[int, Step]:
        if self._arguments is None:
            at, step = self._header(text, at, events)
            if self._arguments is None:
                return at, step
        arguments: list[str] = []
        for index in range(at, len(text)):
            step = self._arguments.push(text[index])
            if step is not Step.WRONG:
                arguments.append(self._arguments.text)
            if step is not Step.MORE:
                self._tell(arguments, events)
                self.end(events)
                return index + (step is Step.LAST), step
        self._tell(arguments, events)
        return len(text), Step.MORE

    def end(self, events: list[Event]) -> None:
        if self._arguments is not None:
            events.append(CallEnd(self.index - 1))
            self._arguments = None

    def _header(self, text: str, at: int, events: list[Event]) -> tuple[int, Step]:
        """Take the name; the call has begun if the arguments have."""
        for index in range(at, len(text)):
            char = text[index]
            if char == "{":
                name = self.undecided.removesuffix(ARGUMENTS).split(CALL_ID)[0].strip()
                if name not in self._names:
                    return index, Step.WRONG
                self.undecided, self._arguments = "", JsonValue()
                events.append(CallBegin(self.index, name))
                self.index += 1
                return index, Step.MORE
            if len(self.undecided) == HEADER_CHARS_MAX:
                return index, Step.WRONG
            self.undecided += char
        return len(text), Step.MORE

    def _tell(self, arguments: list[str], events: list[Event]) -> None:
        if arguments:
            events.append(CallArguments(self.index - 1, "".join(arguments)))
