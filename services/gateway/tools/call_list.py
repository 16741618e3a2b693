"""Parses, incrementally, the JSON of a tool call or of a list of tool calls.

A `CallBody` (delimited_calls.py) parses what follows the marker of a call.
"""

from collections.abc import Container

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.call_object import CallObject
from services.gateway.tools.event import CallArguments, CallBegin, CallEnd, Event
from services.gateway.tools.json_value import Step


class CallList:
    """Emits the events of a call object, or of a JSON list of call objects. A `CallBody`."""

    def __init__(
        self, names: Container[str], index: int, keys: Container[str] | None = None
    ) -> None:
        """`names`, `keys`: see `CallObject`. With `keys`, a list is not accepted.

        `index`: number of calls before this text.
        """
        self._names = names
        self._keys = keys
        self.index = index
        # Characters without an event yet; they become content if the text is no call.
        self._pending: list[str] = []
        self._in_list = False
        self._call: CallObject | None = None
        self._call_begun = False
        self._after_call = False

    @property
    def pending_text(self) -> str:
        return "".join(self._pending)

    def feed(self, text: str, start: int, events: list[Event]) -> tuple[int, Step]:
        for index in range(start, len(text)):
            step = self._take(text[index], events)
            if step is Step.WRONG:
                self.end(events)
                return index, step
            if step is Step.LAST:
                return index + 1, step
        self._emit_arguments(events)
        return len(text), Step.MORE

    def end(self, events: list[Event], rest: str = "") -> None:
        self._end_call(events, complete=False)

    def _end_call(self, events: list[Event], complete: bool) -> None:
        self._emit_arguments(events)
        if self._call_begun:
            events.append(CallEnd(self.index - 1, complete))
            self._call_begun = False

    def _take(self, char: str, events: list[Event]) -> Step:
        if self._call is None:
            return self._between_calls(char)
        step = self._call.push(char)
        if step is Step.WRONG:
            return step
        if not self._call_begun:
            # Until the call has its name, the text may still be ordinary JSON content.
            self._pending.append(char)
            if not self._call.name:
                return step
            self._call_begun = True
            self._pending.clear()
            events.append(CallBegin(self.index, self._call.name))
            self.index += 1
        if step is Step.LAST:
            self._end_call(events, complete=True)
            self._call, self._after_call = None, True
            return Step.MORE if self._in_list else Step.LAST
        return step

    def _between_calls(self, char: str) -> Step:
        """Take a character outside the call objects."""
        if char == "{" and not self._after_call:
            self._call = CallObject(self._names, self._keys)
            self._call.push(char)
        elif char == "[" and not self._in_list and self._keys is None:
            self._in_list = True
        elif char == "," and self._after_call:
            self._after_call = False
        elif char == "]" and self._after_call:
            return Step.LAST
        elif char not in WHITESPACE:
            return Step.WRONG
        self._pending.append(char)
        return Step.MORE

    def _emit_arguments(self, events: list[Event]) -> None:
        """Append an event with the argument text since the last such event."""
        if self._call_begun and self._call is not None and (text := self._call.take()):
            events.append(CallArguments(self.index - 1, text))
