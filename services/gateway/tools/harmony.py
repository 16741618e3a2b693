"""Parses harmony, the format of gpt-oss: messages with a channel and a recipient.

An output such as `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary
to=functions.NAME <|constrain|>json<|message|>{…}<|call|>` continues the prompt's
`<|start|>assistant`. Channel `analysis` is reasoning, messages to `functions` are calls, all others
are content.
"""

import re
from collections.abc import Collection, Container
from enum import Enum, auto

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.event import (
    BufferedParser,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from services.gateway.tools.json_value import JsonValue, Step
from services.gateway.tools.reasoning import ReasoningMarks

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
CONSTRAIN = "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
ANALYSIS, FUNCTIONS, RECIPIENT = "analysis", "functions.", " to="
MARKS = ReasoningMarks(f"{CHANNEL}{ANALYSIS}{MESSAGE}", f"{CHANNEL}final{MESSAGE}")
"""The header of reasoning, and that of the answer, which ends all reasoning."""
HEADER_CHARS_MAX = 512
"""Maximum characters before a message; a longer header is content."""

_ALL = frozenset(MARKERS)
_ENDS = frozenset({END, CALL, RETURN, START})
_HEADER_ENDS = _ENDS | {MESSAGE}
# The beginning and the end of each marker, and the length of the longest.
_BEGIN, _END = "<|", "|>"
_LONGEST = max(map(len, MARKERS))
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]+)")
# A header, or the beginning of one if the role is the beginning of "assistant".
_TO = r"(?:\s*to=[^\s<]*|\s+to?)?"
_HEADER = re.compile(
    rf"(?:<\|start\|>)?(?P<role>\w*){_TO}(?:<\|channel\|>\w*{_TO})?\s*(?:<\|constrain\|>)?\w*\s*"
)
_ROLE = "assistant"


class _HarmonyMode(Enum):
    BETWEEN = auto()
    HEADER = auto()
    MESSAGE = auto()


class HarmonyParser(BufferedParser):
    """Parses reasoning, content and calls. A `Parser`.

    Text without a header is content, as are calls of unknown tools and arguments that are no JSON
    object. A line break separates messages of the same kind.
    """

    def __init__(self, names: Container[str], opened: bool = False) -> None:
        """`names`: names of the tools that may be called.

        `opened`: the prompt has opened the reasoning.
        """
        super().__init__()
        self._names = names
        self._mode = _HarmonyMode.MESSAGE if opened else _HarmonyMode.BETWEEN
        self._at_start = not opened
        # Parts of the header that is being read, and their characters.
        self._header: list[str] = []
        self._header_chars = 0
        # How the text of the current message is emitted, and the kinds that had text before.
        self._kind: type[Content] | type[Reasoning] = Reasoning if opened else Content
        self._emitted: set[type[Content] | type[Reasoning]] = set()
        # Whitespace at the beginning of a message; None after that.
        self._lead: list[str] | None = []
        # Name of the called tool while the message may be a call; its arguments once it has begun.
        self._tool = ""
        self._arguments: JsonValue | None = None
        self._index = 0

    def finish(self) -> list[Event]:
        events: list[Event] = []
        rest = self._buffer.take_rest()
        if self._mode is _HarmonyMode.HEADER:
            header = "".join(self._header)
            if _begins_header(header):
                # The output breaks off within a header, which has no text to show.
                return events
            self._begin_message(Content)
            rest = header + rest
        self._take(rest, events)
        self._end_call(events)
        return events

    def _advance(self, events: list[Event]) -> bool:
        match self._mode:
            case _HarmonyMode.BETWEEN:
                return self._between()
            case _HarmonyMode.HEADER:
                return self._read_header(events)
            case _HarmonyMode.MESSAGE:
                return self._read_message(events)

    def _between(self) -> bool:
        """Read what begins a message."""
        text, position = self._buffer.text, self._buffer.position
        marker, undecided = _marker_at(text, position, _ALL)
        if marker is None and self._at_start and not undecided:
            beginning = text[position : position + len(RECIPIENT)]
            undecided = beginning != RECIPIENT and RECIPIENT.startswith(beginning)
            marker = RECIPIENT if beginning == RECIPIENT else None
        if undecided:
            return False
        self._at_start = False
        if marker is None:
            self._begin_message(Content)
        elif marker in _ENDS and marker != START:
            self._buffer.position += len(marker)
        else:
            self._header.clear()
            self._header_chars, self._mode = 0, _HarmonyMode.HEADER
        return True

    def _read_header(self, events: list[Event]) -> bool:
        if not self._header and self._buffer.read_marker(START):
            self._header.append(START)
        text, end = self._read_until(_HEADER_ENDS)
        room = HEADER_CHARS_MAX - self._header_chars
        self._header.append(text[:room])
        self._header_chars += len(text)
        if len(text) > room:
            # Go back to where the header is too long, wherever the text was cut.
            self._buffer.position -= len(text) - room + len(end or "")
            self._show_header(events)
            return True
        if end == MESSAGE:
            self._choose_kind()
        elif end is not None:
            self._buffer.position -= len(end)
            self._show_header(events)
        return end is not None

    def _show_header(self, events: list[Event]) -> None:
        """Turn a header without a message into content."""
        self._begin_message(Content)
        self._take("".join(self._header), events)

    def _choose_kind(self) -> None:
        header = "".join(self._header)
        _, _, channel = header.partition(CHANNEL)
        recipient = _RECIPIENT.search(header.replace(CHANNEL, " "))
        is_reasoning = channel.startswith(ANALYSIS)
        self._begin_message(Reasoning if is_reasoning else Content)
        if recipient is not None and recipient[1].startswith(FUNCTIONS):
            name = recipient[1].removeprefix(FUNCTIONS)
            if name in self._names:
                self._kind, self._tool = Content, name

    def _begin_message(self, kind: type[Content] | type[Reasoning]) -> None:
        self._mode, self._kind = _HarmonyMode.MESSAGE, kind
        self._lead, self._tool, self._arguments = [], "", None

    def _read_message(self, events: list[Event]) -> bool:
        text, end = self._read_until(_ENDS)
        self._take(text, events)
        if end is None:
            return False
        self._end_call(events)
        self._buffer.position -= len(end)
        self._mode = _HarmonyMode.BETWEEN
        return True

    def _take(self, text: str, events: list[Event]) -> None:
        """Emit text of the current message. Whitespace at its beginning waits for other text."""
        if self._lead is not None:
            begin = text.lstrip(WHITESPACE)
            self._lead.append(text[: len(text) - len(begin)])
            if not begin:
                return
            if self._tool and begin[0] == "{":
                self._begin_call(events)
                text = begin
            else:
                gap = "\n" if self._kind in self._emitted else ""
                text = gap + "".join(self._lead) + begin
            self._lead = None
        if self._arguments is not None:
            text = self._take_arguments(self._arguments, text, events)
        if text:
            self._emitted.add(self._kind)
            events.append(self._kind(text))

    def _begin_call(self, events: list[Event]) -> None:
        self._arguments = JsonValue()
        events.append(CallBegin(self._index, self._tool))
        self._index += 1

    def _take_arguments(self, arguments: JsonValue, text: str, events: list[Event]) -> str:
        """Emit arguments; returns the text after their end, which is content."""
        accepted: list[str] = []
        step, end = Step.MORE, 0
        while step is Step.MORE and end < len(text):
            step = arguments.push(text[end])
            if step is not Step.WRONG:
                accepted.append(arguments.text)
                end += 1
        if accepted:
            events.append(CallArguments(self._index - 1, "".join(accepted)))
        if step is Step.MORE:
            return ""
        self._end_call(events, complete=step is Step.LAST)
        self._begin_message(Content)
        self._take(text[end:], events)
        return ""

    def _end_call(self, events: list[Event], complete: bool = False) -> None:
        if self._arguments is not None:
            events.append(CallEnd(self._index - 1, complete))
            self._arguments = None

    def _read_until(self, markers: Collection[str]) -> tuple[str, str | None]:
        """Read up to and including the first of `markers`; returns the text before it, and it."""
        text, start = self._buffer.text, self._buffer.position
        end = text.find(_BEGIN, start)
        while end >= 0:
            marker, undecided = _marker_at(text, end, markers)
            if undecided or marker is not None:
                self._buffer.position = end + len(marker or "")
                return text[start:end], marker
            end = text.find(_BEGIN, end + len(_BEGIN))
        # The last character may be the first of a marker.
        end = len(text) - text.endswith(_BEGIN[0])
        self._buffer.position = end
        return text[start:end], None


def _marker_at(text: str, start: int, markers: Collection[str]) -> tuple[str | None, bool]:
    """The marker at a position, if there is one, and whether that needs more text."""
    if not text.startswith(_BEGIN, start):
        return None, len(text) - start == 1 and text[start] == _BEGIN[0]
    head = text[start : start + _LONGEST]
    end = head.find(_END, len(_BEGIN))
    if end < 0:
        return None, len(head) < _LONGEST
    marker = head[: end + len(_END)]
    return (marker if marker in markers else None), False


def _begins_header(text: str) -> bool:
    match = _HEADER.fullmatch(text)
    return match is not None and _ROLE.startswith(match["role"])
