"""Text that counts how many characters are looked at or copied."""

from collections.abc import Iterator
from typing import SupportsIndex


class Work:
    """How much has been done, in characters."""

    def __init__(self) -> None:
        self.chars = 0

    def text(self, text: str) -> "CountedText":
        """The text, of which all that is done counts here."""
        return CountedText(text, self)


class CountedText(str):
    """A text that adds to its `Work` what each operation reads of it; so do its parts."""

    __slots__ = ("_work",)

    def __new__(cls, text: str, work: Work) -> "CountedText":
        """See Work.text."""
        made = super().__new__(cls, text)
        made._work = work
        return made

    def _made(self, text: str, chars: int) -> "CountedText":
        self._work.chars += chars
        return CountedText(text, self._work)

    def __add__(self, other: str) -> "CountedText":
        return self._made(str.__add__(self, other), len(self) + len(other))

    def __radd__(self, other: str) -> "CountedText":
        return self._made(str.__add__(other, self), len(self) + len(other))

    def __getitem__(self, key: SupportsIndex | slice) -> "CountedText":
        part = str.__getitem__(self, key)
        return self._made(part, len(part))

    def __iter__(self) -> Iterator["CountedText"]:
        return (self[index] for index in range(len(self)))

    def strip(self, chars: str | None = None, /) -> "CountedText":
        return self._made(str.strip(self, chars), len(self))

    def lstrip(self, chars: str | None = None, /) -> "CountedText":
        return self._made(str.lstrip(self, chars), len(self))

    def rstrip(self, chars: str | None = None, /) -> "CountedText":
        return self._made(str.rstrip(self, chars), len(self))

    def removesuffix(self, suffix: str, /) -> "CountedText":
        return self._made(str.removesuffix(self, suffix), len(self))

    def removeprefix(self, prefix: str, /) -> "CountedText":
        return self._made(str.removeprefix(self, prefix), len(self))

    def find(
        self, part: str, start: SupportsIndex | None = None, end: SupportsIndex | None = None, /
    ) -> int:
        found = str.find(self, part, start, end)
        last = len(self) if found < 0 else found
        self._work.chars += max(0, last - (0 if start is None else start.__index__()))
        return found
