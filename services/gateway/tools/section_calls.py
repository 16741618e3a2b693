"""Parses tool calls with special tokens around a name and a JSON object of arguments."""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from services.gateway.tools.event import CallArguments, CallBegin, CallEnd, Event
from services.gateway.tools.json_value import JsonValue, Step
from services.gateway.tools.tag_reader import Read, TagReader


@dataclass(frozen=True, slots=True)
class SectionTags:
    """The tags of a format, between which whitespace has no meaning.

    `call` begins a call. `header` are the tags before the arguments, each after a name; `call_of`
    turns these names into the name of the tool and the id of the call, which may be empty.
    `endings` follow the arguments, and may be missing. `section_end` follows the calls.
    """

    call: str
    header: Sequence[str]
    call_of: Callable[[Sequence[str]], tuple[str, str]]
    endings: Sequence[str]
    section_end: str


class SectionCalls(TagReader):
    """Parses the calls of a section. A `CallBody`."""

    def __init__(self, tags: SectionTags, names: Container[str], index: int) -> None:
        """`names`: names of the tools that may be called. `index`: number of earlier calls."""
        super().__init__(index)
        self._tags = tags
        self._names = names
        self._between = frozenset({tags.call, tags.section_end, *tags.endings})
        # Names read in the header of the current call; None between calls.
        self._header: list[str] | None = None
        # The arguments of the current call; None before them.
        self._arguments: JsonValue | None = None

    def end(self, events: list[Event], rest: str = "") -> None:
        if self._arguments is not None:
            self._end_call(events, complete=False)

    def _end_call(self, events: list[Event], complete: bool) -> None:
        events.append(CallEnd(self.index - 1, complete))
        self._header = self._arguments = None

    def _read(self, text: str, start: int, events: list[Event]) -> Read:
        if self._arguments is not None:
            return self._read_arguments(self._arguments, text, start, events)
        if self._header is None:
            return self._read_call(text, start)
        if len(self._header) < len(self._tags.header):
            return self._read_header(self._header, text, start)
        return self._begin_call(self._header, text, start, events)

    def _read_call(self, text: str, start: int) -> Read:
        tags = self._tags
        start, tag, step = self.read_tag(text, start, self._between)
        if tag == tags.call:
            self._header = []
        elif tag is not None:
            self.pending.clear()
        return start, Step.LAST if tag == tags.section_end else step

    def _read_header(self, header: list[str], text: str, start: int) -> Read:
        start, name, step = self.read_name(text, start)
        if step is not None:
            return start, step
        start, tag, step = self.read_tag(text, start, {self._tags.header[len(header)]})
        if tag is not None:
            header.append(name)
            self.end_name()
        return start, step

    def _begin_call(
        self, header: Sequence[str], text: str, start: int, events: list[Event]
    ) -> Read:
        start, tag, step = self.read_tag(text, start, {"{"})
        if tag is None:
            return start, step
        name, call_id = self._tags.call_of(header)
        if name not in self._names:
            return start, Step.WRONG
        self.pending.clear()
        self._arguments = JsonValue()
        events.append(CallBegin(self.index, name, call_id))
        self.index += 1
        return start - len(tag), None

    def _read_arguments(
        self, arguments: JsonValue, text: str, start: int, events: list[Event]
    ) -> Read:
        accepted: list[str] = []
        step, end = Step.MORE, start
        while step is Step.MORE and end < len(text):
            step = arguments.push(text[end])
            if step is not Step.WRONG:
                accepted.append(arguments.text)
                end += 1
        if accepted:
            events.append(CallArguments(self.index - 1, "".join(accepted)))
        if step is Step.LAST:
            self._end_call(events, complete=True)
            return end, None
        return end, step
