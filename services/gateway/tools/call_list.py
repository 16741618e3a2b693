"""From the JSON of one tool call, or of a list of them, to events."""

from collections.abc import Container

from services.gateway.text.held_text import BLANKS
from services.gateway.tools.call_object import CallObject
from services.gateway.tools.event import CallArguments, CallBegin, CallEnd, Event
from services.gateway.tools.json_value import Step


class CallList:
    """A call object, or several in brackets; a Body."""

    def __init__(
        self, names: Container[str], index: int, keys: Container[str] | None = None
    ) -> None:
        """`names`, `keys`: see CallObject. With `keys` there may be no list."""
        self._names = names
        self._keys = keys
        self.index = index
        self._held: list[str] = []
        self._in_list = False
        self._call: CallObject | None = None
        self._open = False
        self._comma = False

    @property
    def undecided(self) -> str:
        return "".join(self._held)

    def feed(self, text: str, at: int, events: list[Event]) -> tuple[int, Step]:
        for index in range(at, len(text)):
            step = self._take(text[index], events)
            if step is Step.WRONG:
                self.end(events)
                return index, step
            if step is Step.LAST:
                return index + 1, step
        self._tell(events)
        return len(text), Step.MORE

    def end(self, events: list[Event]) -> None:
        self._tell(events)
        if self._open:
            events.append(CallEnd(self.index - 1))
            self._open = False

    def _take(self, char: str, events: list[Event]) -> Step:
        if self._call is None:
            return self._between(char)
        step = self._call.push(char)
        if step is Step.WRONG:
            return step
        if not self._open:
            self._held.append(char)
            if not self._call.name:
                return step
            self._open = True
            self._held.clear()
            events.append(CallBegin(self.index, self._call.name))
            self.index += 1
        if step is Step.LAST:
            self.end(events)
            self._call, self._comma = None, True
            return Step.MORE if self._in_list else Step.LAST
        return step

    def _between(self, char: str) -> Step:
        """Outside of a call object."""
        if char == "{" and not self._comma:
            self._call = CallObject(self._names, self._keys)
            self._call.push(char)
        elif char == "[" and not self._in_list and self._keys is None:
            self._in_list = True
        elif char == "," and self._comma:
            self._comma = False
        elif char == "]" and self._comma:
            return Step.LAST
        elif char not in BLANKS:
            return Step.WRONG
        self._held.append(char)
        return Step.MORE

    def _tell(self, events: list[Event]) -> None:
        """Add the arguments that have come."""
        if self._open and self._call is not None and (text := self._call.take()):
            events.append(CallArguments(self.index - 1, text))
