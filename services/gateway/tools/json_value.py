"""Validates a JSON value incrementally, character by character."""

import re
from enum import Enum, auto

from services.gateway.text.text_buffer import WHITESPACE

DEPTH_MAX = 64
"""Maximum nesting of objects and lists."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_LITERALS = ("true", "false", "null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
# Escape sequences of control characters, which models write unescaped into strings.
_CONTROLS = {chr(code): f"\\u{code:04x}" for code in range(32)} | {
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}


class Step(Enum):
    """Effect of a character on a value that is parsed."""

    MORE = auto()
    """The character belongs to the value, which is not complete."""
    LAST = auto()
    """The character completes the value."""
    PAST = auto()
    """The value was complete before this character, which does not belong to it."""
    WRONG = auto()
    """The text is not valid."""


class _Expect(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    COMMA_OR_END = auto()


class JsonValue:
    """Validates a value of any type; push characters as long as `push` returns `Step.MORE`.

    Accepts unescaped control characters in strings, which JSON forbids and models write. `text` is
    the latest character, escaped where JSON requires it.
    """

    def __init__(self) -> None:
        # Closing brackets of the open objects and lists, the innermost last.
        self._stack: list[str] = []
        self._expect = _Expect.VALUE
        self._in_string = False
        self._is_key = False
        # 0 outside an escape sequence, 1 after the backslash, 5 to 2 before each digit of \uXXXX.
        self._escape = 0
        # Characters of the current number or literal.
        self._scalar: list[str] = []
        self.text = ""

    def push(self, char: str) -> Step:
        """Take the next character."""
        self.text = char
        if self._in_string:
            return self._string(char)
        if self._scalar:
            return self._scalar_char(char)
        if char in WHITESPACE:
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
            # A hexadecimal digit of \uXXXX: count down to the end of the escape.
            self._escape = self._escape - 1 if self._escape > 2 else 0
            return Step.MORE if char in _HEX else Step.WRONG
        if char == "\\":
            self._escape = 1
        elif char == '"':
            self._in_string = False
            if self._is_key:
                self._expect = _Expect.COLON
                return Step.MORE
            return self._end_value()
        else:
            self.text = _CONTROLS.get(char, char)
        return Step.MORE

    def _scalar_char(self, char: str) -> Step:
        """Take a character in or after a number or literal, which ends at the next character."""
        if self._scalar[0] in _NUMBER_CHARS:
            if char in _NUMBER_CHARS:
                self._scalar.append(char)
                return Step.MORE
            complete = _NUMBER.fullmatch("".join(self._scalar)) is not None
        else:
            literal = "".join(self._scalar)
            if any(known.startswith(literal + char) for known in _LITERALS):
                self._scalar.append(char)
                return Step.MORE
            complete = literal in _LITERALS
        if not complete:
            return Step.WRONG
        self._scalar.clear()
        if self._end_value() is Step.LAST:
            return Step.PAST
        return Step.MORE if char in WHITESPACE else self._token(char)

    def _token(self, char: str) -> Step:
        """Take a character outside strings, numbers and literals."""
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
                return self._end_value()
            case _Expect.KEY | _Expect.KEY_OR_END if char == '"':
                self._in_string = self._is_key = True
                return Step.MORE
            case _Expect.VALUE | _Expect.ITEM_OR_END:
                return self._value(char)
        return Step.WRONG

    def _value(self, char: str) -> Step:
        """Take the first character of a value."""
        if char in "{[":
            self._stack.append("}" if char == "{" else "]")
            self._expect = _Expect.KEY_OR_END if char == "{" else _Expect.ITEM_OR_END
            return Step.MORE if len(self._stack) <= DEPTH_MAX else Step.WRONG
        if char == '"':
            self._in_string, self._is_key = True, False
            return Step.MORE
        if char in "-0123456789tfn":
            self._scalar.append(char)
            return Step.MORE
        return Step.WRONG

    def _end_value(self) -> Step:
        """End a value; return LAST if it is the outermost value."""
        self._expect = _Expect.COMMA_OR_END
        return Step.MORE if self._stack else Step.LAST
