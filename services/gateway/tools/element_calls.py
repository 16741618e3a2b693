"""Parses tool calls with a tag for the tool and an element for each argument.

An example is `<function=get><parameter=city>Paris</parameter></function>`. The arguments become
JSON: strings are emitted while they are written, other values when they are complete, because the
type may depend on all of the text.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from services.gateway.text.text_buffer import partial_match_length
from services.gateway.tools.argument_types import (
    ALL_TYPES,
    ONLY_STRING,
    ToolTypes,
    json_text,
    quoted,
)
from services.gateway.tools.event import CallArguments, CallBegin, CallEnd, Event
from services.gateway.tools.json_value import Step
from services.gateway.tools.tag_reader import Read, TagReader

Types = Mapping[str, ToolTypes]
"""The types of the arguments of each tool."""


@dataclass(frozen=True, slots=True)
class ElementTags:
    """The tags of a format, between which whitespace has no meaning.

    `call` precedes the name of a tool; if it is empty, the name follows the marker of the section,
    which has one call. `name_end` follows the name, `argument` precedes the name of an argument.
    `key_ends` follow that name, each with the types that it states, or None if the schema has them.
    `value` is a further tag before the value, or empty; `value_end` follows the value, `call_end`
    the arguments, and `section_end` the calls. With `padded`, a line break at either end of a value
    is not part of it.
    """

    call: str
    name_end: str
    argument: str
    key_ends: Mapping[str, frozenset[str] | None]
    value: str
    value_end: str
    call_end: str
    section_end: str
    padded: bool = False


class _State(Enum):
    CALL = auto()
    NAME = auto()
    ELEMENT = auto()
    KEY = auto()
    VALUE_TAG = auto()
    VALUE_START = auto()
    VALUE = auto()


class ElementCalls(TagReader):
    """Parses the calls of a section. A `CallBody`."""

    def __init__(self, tags: ElementTags, names: Container[str], types: Types, index: int) -> None:
        """`names`: names of the tools that may be called. `index`: number of earlier calls."""
        super().__init__(index)
        self._tags = tags
        self._names = names
        self._types = types
        self._state = _State.CALL if tags.call else _State.NAME
        # Name of the tool of the current call, and whether the call has begun.
        self._tool = ""
        self._begun = False
        self._has_arguments = False
        self._key = ""
        self._value_types = ALL_TYPES
        # The tags between calls and within a call.
        self._between = frozenset({tags.call, tags.section_end})
        self._within = frozenset({tags.argument, tags.call_end})
        # Text of a value that is emitted when it is complete.
        self._value: list[str] = []
        self._value_ends = (*(["\n" + tags.value_end] if tags.padded else ()), tags.value_end)
        self._readers: Mapping[_State, Callable[[str, int, list[Event]], Read]] = {
            _State.CALL: self._read_call,
            _State.NAME: self._read_name,
            _State.ELEMENT: self._read_element,
            _State.KEY: self._read_key,
            _State.VALUE_TAG: self._read_value_tag,
            _State.VALUE_START: self._read_value_start,
            _State.VALUE: self._read_value,
        }

    def end(self, events: list[Event], rest: str = "") -> None:
        if not self._begun:
            return
        if self._state is _State.VALUE:
            self._take_value(rest, events)
            if not self._streams:
                self._emit(self._key_text() + "".join(self._value), events)
        self._end_call(events, complete=False)

    def _read(self, text: str, start: int, events: list[Event]) -> Read:
        return self._readers[self._state](text, start, events)

    @property
    def _streams(self) -> bool:
        """Whether the value is emitted while it is written, because it is a string."""
        return self._value_types == ONLY_STRING

    def _read_call(self, text: str, start: int, events: list[Event]) -> Read:
        tags = self._tags
        start, tag, step = self.read_tag(text, start, self._between)
        if tag == tags.section_end:
            self.pending.clear()
            return start, Step.LAST
        self._state = _State.CALL if tag is None else _State.NAME
        return start, step

    def _read_name(self, text: str, start: int, events: list[Event]) -> Read:
        start, name, step = self.read_name(text, start)
        if step is not None:
            return start, step
        if name not in self._names:
            return start, Step.WRONG
        if self._tags.name_end:
            start, tag, step = self.read_tag(text, start, {self._tags.name_end})
            if tag is None:
                return start, step
        self.end_name()
        self._tool, self._state = name, _State.ELEMENT
        return start, None

    def _read_element(self, text: str, start: int, events: list[Event]) -> Read:
        tags = self._tags
        start, tag, step = self.read_tag(text, start, self._within)
        if tag is None:
            return start, step
        # A call begins with the first tag after its name, because a name alone may be content.
        if not self._begun:
            self.pending.clear()
            self._begun, self._has_arguments = True, False
            events.append(CallBegin(self.index, self._tool))
            self.index += 1
            self._emit("{", events)
        if tag == tags.argument:
            self._state = _State.KEY
            return start, None
        self.pending.clear()
        self._emit("}", events)
        self._end_call(events, complete=True)
        self._state = _State.CALL
        return start, Step.LAST if tags.call_end == tags.section_end else None

    def _end_call(self, events: list[Event], complete: bool) -> None:
        events.append(CallEnd(self.index - 1, complete))
        self._begun = False

    def _read_key(self, text: str, start: int, events: list[Event]) -> Read:
        start, key, step = self.read_name(text, start)
        if step is not None:
            return start, step
        start, tag, step = self.read_tag(text, start, self._tags.key_ends)
        if tag is None:
            return start, step
        types = self._tags.key_ends[tag]
        if types is None:
            types = self._types.get(self._tool, {}).get(key, ALL_TYPES)
        self.end_name()
        self._key, self._value_types = key, types
        self._state = _State.VALUE_TAG if self._tags.value else _State.VALUE_START
        return start, None

    def _read_value_tag(self, text: str, start: int, events: list[Event]) -> Read:
        start, tag, step = self.read_tag(text, start, {self._tags.value})
        if tag is not None:
            self._state = _State.VALUE_START
        return start, step

    def _read_value_start(self, text: str, start: int, events: list[Event]) -> Read:
        if start == len(text):
            return start, Step.MORE
        self.pending.clear()
        self._value.clear()
        if self._streams:
            self._emit(self._key_text() + '"', events)
        self._state = _State.VALUE
        return start + (self._tags.padded and text[start] == "\n"), None

    def _read_value(self, text: str, start: int, events: list[Event]) -> Read:
        end = text.find(self._tags.value_end, start)
        if end < 0:
            held = partial_match_length(text, self._value_ends, start)
            self._take_value(text[start : len(text) - held], events)
            return len(text) - held, Step.MORE
        line_end = self._tags.padded and end > start and text[end - 1] == "\n"
        self._take_value(text[start : end - line_end], events)
        if self._streams:
            self._emit('"', events)
        else:
            value = json_text("".join(self._value), self._value_types)
            self._emit(self._key_text() + value, events)
        self._has_arguments, self._state = True, _State.ELEMENT
        return end + len(self._tags.value_end), None

    def _take_value(self, text: str, events: list[Event]) -> None:
        """Emit or keep the next text of a value."""
        if not self._streams:
            self._value.append(text)
        elif text:
            self._emit(quoted(text)[1:-1], events)

    def _key_text(self) -> str:
        """What precedes the value of the current argument in the JSON object."""
        return f"{', ' if self._has_arguments else ''}{quoted(self._key)}: "

    def _emit(self, text: str, events: list[Event]) -> None:
        events.append(CallArguments(self.index - 1, text))
