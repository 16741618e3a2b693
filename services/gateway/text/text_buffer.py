"""Buffer of streamed text whose end may be the beginning of a marker."""

from collections.abc import Sequence

WHITESPACE = " \t\r\n"
"""Whitespace between the parts of an output."""


def partial_match_length(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Length of the longest suffix of `text[start:]` that begins a marker without completing it."""
    longest = 0
    for marker in markers:
        # `find` skips to the candidates; an end as long as the marker would be the marker itself.
        match = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while match >= 0 and not marker.startswith(text[match:]):
            match = text.find(marker[0], match + 1)
        if match >= 0:
            longest = max(longest, len(text) - match)
    return longest


class TextBuffer:
    """Received text from `position` on, after whitespace that has been read but not assigned.

    The parser decides later whether such whitespace is part of the output. Every character is read
    once, however the text is cut: readers advance `position`, and the rest that they leave in the
    buffer is shorter than a marker.
    """

    def __init__(self) -> None:
        self.text = ""
        self.position = 0
        self._whitespace: list[str] = []

    def add(self, text: str) -> None:
        """Append received text."""
        self.text = self.text[self.position :] + text
        self.position = 0

    @property
    def exhausted(self) -> bool:
        """Whether all text has been read."""
        return self.position == len(self.text)

    def skip_whitespace(self) -> None:
        """Read the whitespace that comes next, and keep it aside."""
        end = self.position
        while end < len(self.text) and self.text[end] in WHITESPACE:
            end += 1
        self._set_aside(end)

    def read_marker(self, marker: str) -> bool | None:
        """Read `marker` if it comes next; None if that depends on text that is not received."""
        start = self.text[self.position : self.position + len(marker)]
        if start == marker:
            self.position += len(marker)
            return True
        return None if marker.startswith(start) else False

    def read_until(self, marker: str) -> tuple[str, bool]:
        """Read up to and including a marker, or everything that cannot be the start of a marker.

        Returns the text before the marker, with the whitespace kept aside before it, and whether
        the marker was read. Whitespace at the end of the text is kept aside.
        """
        start = self.text.find(marker, self.position)
        end = (
            len(self.text) - partial_match_length(self.text, (marker,), self.position)
            if start < 0
            else start
        )
        shown = self.text[self.position : end].rstrip(WHITESPACE)
        if shown:
            shown_end = self.position + len(shown)
            shown = self.take_whitespace() + shown
            self.position = shown_end
        self._set_aside(end)
        if start < 0:
            return shown, False
        self.position += len(marker)
        return shown, True

    def take_whitespace(self) -> str:
        """Remove and return the whitespace that was kept aside."""
        taken = "".join(self._whitespace)
        self._whitespace.clear()
        return taken

    def take_rest(self) -> str:
        """Remove and return the whitespace that was kept aside and all unread text."""
        taken = self.take_whitespace() + self.text[self.position :]
        self.position = len(self.text)
        return taken

    def _set_aside(self, end: int) -> None:
        """Read the whitespace up to `end` and keep it aside."""
        if end > self.position:
            self._whitespace.append(self.text[self.position : end])
            self.position = end
