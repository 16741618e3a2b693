"""Separates the reasoning between `<think>` and `</think>` from the answer after it."""

from enum import Enum, auto

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.event import BufferedParser, Content, Event, Reasoning

OPEN, CLOSE = "<think>", "</think>"


class _Mode(Enum):
    START = auto()
    THINKING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningSplit(BufferedParser):
    """Splits the text at the closing marker and omits the whitespace there. A `Parser`.

    Text that does not begin with the opening marker is the answer, unless the prompt has already
    `opened` the reasoning.
    """

    def __init__(self, opened: bool) -> None:
        super().__init__()
        self._opened = opened
        self._mode = _Mode.START
        # Whether reasoning has been emitted; whitespace before its first text is omitted.
        self._thought = False

    def finish(self) -> list[Event]:
        rest = self._buffer.take_rest()
        if self._mode is _Mode.START:
            # The text ended within what may be the opening marker.
            self._mode = _Mode.THINKING if self._opened else _Mode.ANSWER
        if self._mode is _Mode.THINKING:
            rest = rest.rstrip(WHITESPACE) if self._thought else rest.strip(WHITESPACE)
            return [Reasoning(rest)] if rest else []
        return [Content(rest)] if rest and self._mode is _Mode.ANSWER else []

    def _advance(self, events: list[Event]) -> bool:
        match self._mode:
            case _Mode.START:
                return self._start()
            case _Mode.THINKING:
                return self._think(events)
            case _Mode.GAP:
                return self._gap()
            case _Mode.ANSWER:
                events.append(Content(self._buffer.take_rest()))
                return False

    def _start(self) -> bool:
        self._buffer.skip_whitespace()
        opened = self._buffer.read_marker(OPEN)
        if opened is None:
            return False
        self._mode = _Mode.THINKING if opened or self._opened else _Mode.ANSWER
        return True

    def _think(self, events: list[Event]) -> bool:
        if not self._thought:
            self._buffer.skip_whitespace()
            self._buffer.take_whitespace()
        text, closed = self._buffer.read_until(CLOSE)
        if text:
            self._thought = True
            events.append(Reasoning(text))
        if closed:
            self._mode = _Mode.GAP
        return closed

    def _gap(self) -> bool:
        self._buffer.skip_whitespace()
        self._buffer.take_whitespace()
        if not self._buffer.exhausted:
            self._mode = _Mode.ANSWER
        return True
