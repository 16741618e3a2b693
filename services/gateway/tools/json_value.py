"""Follows one JSON value character by character."""

import re
from enum import Enum, auto

from services.gateway.text.held_text import BLANKS

DEPTH_MAX = 64
"""Most objects and lists inside each other."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_WORDS = ("true", "false", "null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
_CONTROLS = {chr(code): f"\\u{code:04x}" for code in range(32)} | {
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}


class Step(Enum):
    """What a character is to the value."""

    MORE = auto()
    """It belongs to the value, which goes on."""
    LAST = auto()
    """It ends the value."""
    PAST = auto()
    """It does not belong to the value, which was complete before it."""
    WRONG = auto()
    """The value is no JSON."""


class _Expect(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonValue:
    """One value of any type. Feed it until it says anything else than `Step.MORE`.

    Control characters in strings, which models write and JSON forbids, are let pass; `text` is the
    latest character as JSON has it.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._in_string = False
        self._is_key = False
        self._escape = 0
        self._word: list[str] = []
        self.text = ""

    def push(self, char: str) -> Step:
        """Take the next character."""
        self.text = char
        if self._in_string:
            return self._string(char)
        if self._word:
            return self._more_of_word(char)
        if char in BLANKS:
            return Step.MORE
        return self._token(char)

    def _string(self, char: str) -> Step:
        if self._escape == 1:
            if char == "u":
                self._escape = 5
                return Step.MORE
            self._escape = 0
            return Step.MORE if char in _ESCAPES else Step.WRONG
        if self._escape:
            # One of the four digits after "u", which count down to the end of the escape.
            self._escape = self._escape - 1 if self._escape > 2 else 0
            return Step.MORE if char in _HEX else Step.WRONG
        if char == "\\":
            self._escape = 1
        elif char == '"':
            self._in_string = False
            if self._is_key:
                self._expect = _Expect.COLON
                return Step.MORE
            return self._ended()
        else:
            self.text = _CONTROLS.get(char, char)
        return Step.MORE

    def _more_of_word(self, char: str) -> Step:
        """A number or one of the three words, whose end only the next character shows."""
        if self._word[0] in _NUMBER_CHARS:
            if char in _NUMBER_CHARS:
                self._word.append(char)
                return Step.MORE
            complete = _NUMBER.fullmatch("".join(self._word)) is not None
        else:
            word = "".join(self._word)
            if any(known.startswith(word + char) for known in _WORDS):
                self._word.append(char)
                return Step.MORE
            complete = word in _WORDS
        if not complete:
            return Step.WRONG
        self._word.clear()
        if self._ended() is Step.LAST:
            return Step.PAST
        return Step.MORE if char in BLANKS else self._token(char)

    def _token(self, char: str) -> Step:
        """Any character outside of strings and words."""
        match self._expect:
            case _Expect.COLON:
                self._expect = _Expect.VALUE
                return Step.MORE if char == ":" else Step.WRONG
            case _Expect.COMMA_OR_END if char == ",":
                self._expect = _Expect.KEY if self._stack[-1] == "}" else _Expect.VALUE
                return Step.MORE
            case _Expect.COMMA_OR_END | _Expect.KEY_OR_END | _Expect.ITEM_OR_END if (
                char == self._stack[-1]
            ):
                self._stack.pop()
                return self._ended()
            case _Expect.KEY | _Expect.KEY_OR_END if char == '"':
                self._in_string = self._is_key = True
                return Step.MORE
            case _Expect.VALUE | _Expect.ITEM_OR_END:
                return self._value(char)
        return Step.WRONG

    def _value(self, char: str) -> Step:
        """The first character of a value."""
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.ITEM_OR_END
            return Step.MORE if len(self._stack) <= DEPTH_MAX else Step.WRONG
        if char == '"':
            self._in_string, self._is_key = True, False
            return Step.MORE
        if char in "-0123456789tfn":
            self._word.append(char)
            return Step.MORE
        return Step.WRONG

    def _ended(self) -> Step:
        """A value has ended, perhaps the outermost one."""
        self._expect = _Expect.COMMA_OR_END
        return Step.MORE if self._stack else Step.LAST
