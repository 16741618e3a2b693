"""Reads tags and names in the calls of a section; base of parsers that a marker opens."""

from abc import ABC, abstractmethod
from collections.abc import Collection

from services.gateway.text.text_buffer import WHITESPACE
from services.gateway.tools.event import Event
from services.gateway.tools.json_value import Step

NAME_CHARS_MAX = 256
"""Maximum characters of a name, of a tool or of an argument."""
# Characters that end a name.
_NAME_END = frozenset('<>"`{\n')

Read = tuple[int, Step | None]
"""The position after the text that was read, and its effect; None: read on in the next state."""


class TagReader(ABC):
    """Base of a `CallBody`. Leaves the beginning of a tag unread until the tag is complete."""

    def __init__(self, index: int) -> None:
        """`index`: number of earlier calls."""
        self.index = index
        # Text without an event, which becomes content if no call or argument follows.
        self.pending: list[str] = []
        # Parts of the name that is being read.
        self._name: list[str] = []
        # Unread characters that begin a tag, and the tags that they may be.
        self._matched = 0
        self._candidates: Collection[str] = frozenset()

    @property
    def pending_text(self) -> str:
        return "".join(self.pending)

    def feed(self, text: str, start: int, events: list[Event]) -> tuple[int, Step]:
        step: Step | None = None
        while step is None:
            start, step = self._read(text, start, events)
        if step is Step.WRONG:
            self.end(events)
        return start, step

    @abstractmethod
    def end(self, events: list[Event], rest: str = "") -> None: ...

    @abstractmethod
    def _read(self, text: str, start: int, events: list[Event]) -> Read:
        """Read the part of the calls that is next."""

    def read_name(self, text: str, start: int) -> tuple[int, str, Step | None]:
        """Read a name up to a character that ends it; returns the position, the name and a step.

        Another call returns the same name until `end_name`.
        """
        if not self._name:
            start = self._skip_whitespace(text, start)
        end, limit = start, start + NAME_CHARS_MAX - sum(map(len, self._name))
        while end < len(text) and end < limit and text[end] not in _NAME_END:
            end += 1
        if end > start:
            self.pending.append(text[start:end])
            self._name.append(text[start:end])
        if end == len(text):
            return end, "", Step.MORE
        ended = text[end] in _NAME_END
        return end, "".join(self._name).strip(WHITESPACE), None if ended else Step.WRONG

    def end_name(self) -> None:
        """Forget the name, so that the next can be read."""
        self._name.clear()

    def read_tag(
        self, text: str, start: int, tags: Collection[str]
    ) -> tuple[int, str | None, Step | None]:
        """Read whitespace and one of `tags`, none of which begins with another.

        Returns the position, the tag and a step. Each character is compared once.
        """
        known = self._matched
        if not known:
            start, self._candidates = self._skip_whitespace(text, start), tags
        new = text[start + known : start + max(map(len, self._candidates))]
        self._candidates = frozenset(
            tag for tag in self._candidates if tag.startswith(new[: len(tag) - known], known)
        )
        for tag in self._candidates:
            if len(tag) <= known + len(new):
                self._matched = 0
                self.pending.append(tag)
                return start + len(tag), tag, None
        self._matched = known + len(new) if self._candidates else 0
        return start, None, Step.MORE if self._candidates else Step.WRONG

    def _skip_whitespace(self, text: str, start: int) -> int:
        end = start
        while end < len(text) and text[end] in WHITESPACE:
            end += 1
        self.pending.append(text[start:end])
        return end
