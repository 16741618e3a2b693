"""Separates reasoning between two markers, such as `<think>` and `</think>`, from the answer."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.event import BufferedParser, Content, Event, Reasoning

OPEN, CLOSE = "<think>", "</think>"


class ReasoningMarks(NamedTuple):
    """The markers before and after reasoning."""

    opening: str
    closing: str


THINK = ReasoningMarks(OPEN, CLOSE)
MISTRAL_THINK = ReasoningMarks("[THINK]", "[/THINK]")


class _Mode(Enum):
    START = auto()
    THINKING = auto()
    GAP = auto()
    ANSWER = auto()


class ReasoningSplit(BufferedParser):
    """Splits the text at the closing marker and omits the whitespace there. A `Parser`.

    Text that does not begin with the opening marker is the answer, unless the prompt has already
    `opened` the reasoning. `ends` are markers that end the reasoning as well, and begin the answer.
    """

    def __init__(
        self, opened: bool, marks: ReasoningMarks = THINK, ends: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self._marks = marks
        self._ends = (marks.closing, *ends)
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
        opened = self._buffer.read_marker(self._marks.opening)
        if opened is None:
            return False
        self._mode = _Mode.THINKING if opened or self._opened else _Mode.ANSWER
        return True

    def _think(self, events: list[Event]) -> bool:
        if not self._thought:
            self._buffer.skip_whitespace()
            self._buffer.take_whitespace()
        text, end = self._buffer.read_until(*self._ends)
        if text:
            self._thought = True
            events.append(Reasoning(text))
        if end is None:
            return False
        if end != self._marks.closing:
            self._buffer.position -= len(end)
        self._mode = _Mode.GAP
        return True

    def _gap(self) -> bool:
        self._buffer.skip_whitespace()
        self._buffer.take_whitespace()
        if not self._buffer.exhausted:
            self._mode = _Mode.ANSWER
        return True


class AnswerStart:
    """Finds where the answer begins in a text that may begin with reasoning.

    The whitespace between reasoning and answer belongs to the reasoning, as in `ReasoningSplit`.
    """

    def __init__(self, opened: bool, marks: ReasoningMarks = THINK) -> None:
        """`opened`: the prompt has opened the reasoning."""
        self._marks = marks
        self._mode = _Mode.THINKING if opened else _Mode.START
        self._end = ""

    def split(self, text: str) -> tuple[str, str]:
        """Split the next piece of text into reasoning and answer.

        Text that may be the beginning of the opening marker is held back, and is part of a later
        result.
        """
        reasoning = ""
        if self._mode is _Mode.START:
            text, self._end = self._end + text, ""
            begin = text.lstrip(WHITESPACE)
            if not begin.startswith(self._marks.opening):
                if self._marks.opening.startswith(begin):
                    self._end = text
                    return "", ""
                self._mode = _Mode.ANSWER
            else:
                self._mode = _Mode.THINKING
        if self._mode is _Mode.THINKING:
            reasoning, text = self._close(text)
        if self._mode is _Mode.GAP:
            answer = text.lstrip(WHITESPACE)
            reasoning += text[: len(text) - len(answer)]
            if text := answer:
                self._mode = _Mode.ANSWER
        return reasoning, text

    def _close(self, text: str) -> tuple[str, str]:
        """Split `text` after the closing marker, of which earlier text may have the beginning."""
        known = len(self._end)
        joined = self._end + text
        closing = self._marks.closing
        position = joined.find(closing)
        if position < 0:
            self._end = joined[1 - len(closing) :]
            return text, ""
        self._mode = _Mode.GAP
        end = position + len(closing) - known
        return text[:end], text[end:]

    def flush(self) -> str:
        """Return the text that is still held back, which is an answer; call it at the end."""
        return self._end if self._mode is _Mode.START else ""
