"""Reasoning between `<think>` and `</think>`, which stands before the answer."""

from enum import Enum, auto

from services.gateway.held_text import blank_end, undecided
from services.gateway.tools.event import Content, Event, Reasoning

OPEN, CLOSE = "<think>", "</think>"
_BLANKS = " \t\r\n"


class _Mode(Enum):
    START = auto()
    THINKING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningSplit:
    """Parts the text at the closing mark. Blanks around the reasoning belong to nobody.

    Text that does not begin with the opening mark is the answer, but if the prompt has `opened`
    the reasoning already.
    """

    def __init__(self, opened: bool) -> None:
        self._opened = opened
        self._mode = _Mode.START
        self._buffer = ""
        self._thought = False

    def push(self, text: str) -> list[Event]:
        """See Parser."""
        self._buffer += text
        events: list[Event] = []
        while self._buffer and self._advance(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """See Parser."""
        rest, self._buffer = self._buffer, ""
        if self._mode is _Mode.START:
            self._mode = _Mode.THINKING if self._opened else _Mode.ANSWER
        if self._mode is _Mode.THINKING:
            rest = rest.strip(_BLANKS)
            return [Reasoning(rest)] if rest else []
        return [Content(rest)] if rest and self._mode is _Mode.ANSWER else []

    def _advance(self, events: list[Event]) -> bool:
        """Take some of the buffer; False if it needs more text."""
        match self._mode:
            case _Mode.START:
                return self._start()
            case _Mode.THINKING:
                return self._think(events)
            case _Mode.GAP:
                self._buffer = self._buffer.lstrip(_BLANKS)
                if self._buffer:
                    self._mode = _Mode.ANSWER
                return True
            case _Mode.ANSWER:
                events.append(Content(self._buffer))
                self._buffer = ""
                return False

    def _start(self) -> bool:
        rest = self._buffer.lstrip(_BLANKS)
        if OPEN.startswith(rest) and rest != OPEN:
            return False
        if rest.startswith(OPEN):
            # What follows is held until there is more than blanks.
            self._buffer, self._mode = rest.removeprefix(OPEN), _Mode.THINKING
        else:
            self._mode = _Mode.THINKING if self._opened else _Mode.ANSWER
        return True

    def _think(self, events: list[Event]) -> bool:
        if not self._thought:
            self._buffer = self._buffer.lstrip(_BLANKS)
        start = self._buffer.find(CLOSE)
        end = len(self._buffer) - undecided(self._buffer, (CLOSE,)) if start < 0 else start
        end -= blank_end(self._buffer[:end])
        if end:
            self._thought = True
            events.append(Reasoning(self._buffer[:end]))
        if start < 0:
            self._buffer = self._buffer[end:]
            return False
        self._buffer, self._mode = self._buffer[start + len(CLOSE) :], _Mode.GAP
        return True
