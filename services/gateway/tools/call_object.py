"""Follows the JSON object in which a model writes a tool call, as its name and arguments come."""

import json
from collections.abc import Container
from enum import Enum, auto

from services.gateway.text.held_text import BLANKS
from services.gateway.tools.json_value import JsonValue, Step

NAME_KEY = "name"
ARGUMENTS_KEYS = frozenset({"arguments", "parameters"})
EMPTY = "{}"


class _ExpectInCall(Enum):
    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class CallObject:
    """`{"name": …, "arguments": {…}}`, with "parameters" as another word, in any order.

    The call has begun once its name is known and its arguments have: `name` is set, and `take`
    gives the arguments so far. `Step.WRONG` says that this is no call: its name is not among
    `names` (the tools of the request), or its arguments are no object.
    """

    def __init__(self, names: Container[str], keys: Container[str] | None = None) -> None:
        """`keys`: other keys that the object may have; None for any."""
        self._names = names
        self._keys = keys
        self._expect = _ExpectInCall.OPEN
        self._key = ""
        self._value = JsonValue()
        # Characters of the key or value that is being read.
        self._text: list[str] = []
        self._known_name = ""
        self._arguments: list[str] | None = None

    @property
    def name(self) -> str:
        """Empty until the call has begun."""
        return self._known_name if self._arguments is not None else ""

    def take(self) -> str:
        """The arguments that have come since the last time."""
        taken, self._arguments = self._arguments or (), []
        return "".join(taken)

    def push(self, char: str) -> Step:
        """Take the next character; see Step, of which PAST does not occur."""
        match self._expect:
            case _ExpectInCall.VALUE:
                return self._more_of_value(char)
            case _ExpectInCall.KEY | _ExpectInCall.KEY_OR_END if self._text or char == '"':
                return self._more_of_key(char)
        if char in BLANKS:
            return Step.MORE
        return self._mark(char)

    def _mark(self, char: str) -> Step:
        match self._expect, char:
            case _ExpectInCall.OPEN, "{":
                self._expect = _ExpectInCall.KEY_OR_END
            case _ExpectInCall.COLON, ":":
                self._expect, self._value = _ExpectInCall.VALUE, JsonValue()
            case _ExpectInCall.COMMA_OR_END, ",":
                self._expect = _ExpectInCall.KEY
            case ((_ExpectInCall.COMMA_OR_END | _ExpectInCall.KEY_OR_END), "}"):
                return self._close()
            case _:
                return Step.WRONG
        return Step.MORE

    def _close(self) -> Step:
        if not self._known_name:
            return Step.WRONG
        if self._arguments is None:
            # A tool without arguments.
            if self._keys is not None:
                return Step.WRONG
            self._arguments = [EMPTY]
        return Step.LAST

    def _more_of_key(self, char: str) -> Step:
        if not self._text:
            self._value = JsonValue()
        step = self._value.push(char)
        self._text.append(self._value.text)
        if step is not Step.LAST:
            return step
        self._key = json.loads(self._take_text())
        self._expect = _ExpectInCall.COLON
        return Step.MORE if self._allowed(self._key) else Step.WRONG

    def _allowed(self, key: str) -> bool:
        """Whether the object may have this key, once more."""
        if key == NAME_KEY:
            return not self._known_name
        if key in ARGUMENTS_KEYS:
            return self._arguments is None
        return self._keys is None or key in self._keys

    def _more_of_value(self, char: str) -> Step:
        step = self._value.push(char)
        if step is Step.WRONG:
            return step
        if self._key in ARGUMENTS_KEYS:
            return self._more_of_arguments(char, step)
        if self._key == NAME_KEY and step is not Step.PAST:
            self._text.append(self._value.text)
        if step is Step.MORE:
            return step
        if self._key == NAME_KEY and not self._named():
            return Step.WRONG
        self._expect = _ExpectInCall.COMMA_OR_END
        return self.push(char) if step is Step.PAST else Step.MORE

    def _more_of_arguments(self, char: str, step: Step) -> Step:
        if self._arguments is None:
            if char in BLANKS:
                return Step.MORE
            if char != "{":
                return Step.WRONG
            self._arguments = []
        self._arguments.append(self._value.text)
        if step is Step.LAST:
            self._expect = _ExpectInCall.COMMA_OR_END
        return Step.MORE

    def _named(self) -> bool:
        """Note the name; whether it is a tool's."""
        text = self._take_text()
        # Any other value is none; a number of thousands of digits would be an error to Python.
        if not text.startswith('"') or (name := json.loads(text)) not in self._names:
            return False
        self._known_name = name
        return True

    def _take_text(self) -> str:
        """The key or value that has been read."""
        text = "".join(self._text).strip(BLANKS)
        self._text.clear()
        return text
