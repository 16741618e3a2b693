"""Buffer of streamed text whose end may be the beginning of a marker."""

from collections.abc import Sequence

BLANKS = " \t\r\n"
"""Whitespace between the parts of an output."""


def undecided(text: str, marks: Sequence[str], start: int = 0) -> int:
    """Length of the longest suffix of `text[start:]` that begins a marker without completing it."""
    longest = 0
    for mark in marks:
        # `find` skips to the candidates; an end as long as the marker would be the marker itself.
        match = text.find(mark[0], max(start, len(text) - len(mark) + 1))
        while match >= 0 and not mark.startswith(text[match:]):
            match = text.find(mark[0], match + 1)
        if match >= 0:
            longest = max(longest, len(text) - match)
    return longest


class HeldText:
    """Received text from `position` on, after whitespace that has been read but not assigned.

    The parser decides later whether such whitespace is part of the output. Every character is read
    once, however the text is cut: readers advance `position`, and the rest that they leave in the
    buffer is shorter than a marker.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self._blanks: list[str] = []

    def add(self, text: str) -> None:
        """Append received text."""
        self.text = self.text[self.position :] + text
        self.position = 0

    @property
    def over(self) -> bool:
        """Whether all text has been read."""
        return self.position == len(self.text)

    def skip_blanks(self) -> None:
        """Read the whitespace that comes next, and keep it aside."""
        end = self.position
        while end < len(self.text) and self.text[end] in BLANKS:
            end += 1
        self._hold(end)

    def starts_with(self, mark: str) -> bool | None:
        """Read `mark` if it comes next; None if that depends on text that is not received."""
        start = self.text[self.position : self.position + len(mark)]
        if start == mark:
            self.position += len(mark)
            return True
        return None if mark.startswith(start) else False

    def before(self, mark: str) -> tuple[str, bool]:
        """Read up to and including a marker, or everything that cannot be the start of a marker.

        Returns the text before the marker, with the whitespace kept aside before it, and whether
        the marker was read. Whitespace at the end of the text is kept aside.
        """
        start = self.text.find(mark, self.position)
        end = len(self.text) - undecided(self.text, (mark,), self.position) if start < 0 else start
        shown = self.text[self.position : end].rstrip(BLANKS)
        if shown:
            shown_end = self.position + len(shown)
            shown = self.take_blanks() + shown
            self.position = shown_end
        self._hold(end)
        if start < 0:
            return shown, False
        self.position += len(mark)
        return shown, True

    def take_blanks(self) -> str:
        """Remove and return the whitespace that was kept aside."""
        taken = "".join(self._blanks)
        self._blanks.clear()
        return taken

    def take(self) -> str:
        """Remove and return the whitespace that was kept aside and all unread text."""
        taken = self.take_blanks() + self.text[self.position :]
        self.position = len(self.text)
        return taken

    def _hold(self, end: int) -> None:
        """Read the whitespace up to `end` and keep it aside."""
        if end > self.position:
            self._blanks.append(self.text[self.position : end])
            self.position = end
