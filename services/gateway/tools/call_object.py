"""Parses, incrementally, the JSON object in which a model writes a tool call."""

import json
from collections.abc import Container
from enum import Enum, auto

from services.gateway.text.text_buffer import WHITESPACE
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
    """Parses `{"name": …, "arguments": {…}}`, in any order of keys; "parameters" is a synonym.

    The call begins when its name is known and its arguments have started: from then on `name` is
    set, and `take` returns the arguments so far. `Step.WRONG` means that the text is no call: the
    name is not among `names` (the request's tools), or the arguments are no object.
    """

    def __init__(self, names: Container[str], keys: Container[str] | None = None) -> None:
        """`keys`: further keys that the object may have; None allows any."""
        self._names = names
        self._keys = keys
        self._expect = _ExpectInCall.OPEN
        self._key = ""
        self._value = JsonValue()
        # Characters of the current key or value.
        self._text: list[str] = []
        self._known_name = ""
        # Argument text that `take` has not returned; None until the arguments start.
        self._arguments: list[str] | None = None

    @property
    def name(self) -> str:
        """Name of the tool; empty until the call has begun."""
        return self._known_name if self._arguments is not None else ""

    def take(self) -> str:
        """Return the argument text since the previous call of `take`."""
        taken, self._arguments = self._arguments or (), []
        return "".join(taken)

    def push(self, char: str) -> Step:
        """Take the next character; never returns `Step.PAST`."""
        match self._expect:
            case _ExpectInCall.VALUE:
                return self._value_char(char)
            case _ExpectInCall.KEY | _ExpectInCall.KEY_OR_END if self._text or char == '"':
                return self._key_char(char)
        if char in WHITESPACE:
            return Step.MORE
        return self._punctuation(char)

    def _punctuation(self, char: str) -> Step:
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
            # Models may omit the arguments of a tool without parameters. With `keys`, an object
            # without arguments is not a call, because it may be an answer in JSON.
            if self._keys is not None:
                return Step.WRONG
            self._arguments = [EMPTY]
        return Step.LAST

    def _key_char(self, char: str) -> Step:
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
        """Return whether the object may have this key; name and arguments may occur once."""
        if key == NAME_KEY:
            return not self._known_name
        if key in ARGUMENTS_KEYS:
            return self._arguments is None
        return self._keys is None or key in self._keys

    def _value_char(self, char: str) -> Step:
        step = self._value.push(char)
        if step is Step.WRONG:
            return step
        if self._key in ARGUMENTS_KEYS:
            return self._arguments_char(char, step)
        if self._key == NAME_KEY and step is not Step.PAST:
            self._text.append(self._value.text)
        if step is Step.MORE:
            return step
        if self._key == NAME_KEY and not self._accept_name():
            return Step.WRONG
        self._expect = _ExpectInCall.COMMA_OR_END
        # A number or literal ends only at the character after it, which belongs to the object.
        return self.push(char) if step is Step.PAST else Step.MORE

    def _arguments_char(self, char: str, step: Step) -> Step:
        if self._arguments is None:
            if char in WHITESPACE:
                return Step.MORE
            if char != "{":
                return Step.WRONG
            self._arguments = []
        self._arguments.append(self._value.text)
        if step is Step.LAST:
            self._expect = _ExpectInCall.COMMA_OR_END
        return Step.MORE

    def _accept_name(self) -> bool:
        """Store the name and return True if it is the name of a tool of the request."""
        text = self._take_text()
        # Only strings are decoded: Python raises for an integer of thousands of digits.
        if not text.startswith('"') or (name := json.loads(text)) not in self._names:
            return False
        self._known_name = name
        return True

    def _take_text(self) -> str:
        """Return the text of the key or value that has just ended."""
        text = "".join(self._text).strip(WHITESPACE)
        self._text.clear()
        return text
