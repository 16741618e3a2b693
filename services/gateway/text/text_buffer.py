"""Buffers streamed text whose end may be the beginning of a marker, such as <tool_call>."""

from collections.abc import Sequence

WHITESPACE = " \t\r\n"
"""Whitespace between the parts of an output."""


def partial_match_length(text: str, markers: Sequence[str], start: int = 0) -> int:
    """Length of the longest suffix of `text[start:]` that begins a marker without completing it."""
    longest = 0
    for marker in markers:
        # Only positions of the marker's first character can match. Shorter ends than the marker
        # suffice: an end of its length would be the complete marker.
        match = text.find(marker[0], max(start, len(text) - len(marker) + 1))
        while match >= 0 and not marker.startswith(text[match:]):
            match = text.find(marker[0], match + 1)
        if match >= 0:
            longest = max(longest, len(text) - match)
    return longest


class TextBuffer:
    """Received text, which is unread from `position` on, and whitespace kept aside.

    Parsers keep whitespace aside until they know whether it is part of the output. Every character
    is read once, however the text is split into pieces: readers advance `position`, and the unread
    rest is shorter than a marker.
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
        """Read whitespace at the current position, and keep it aside."""
        end = self.position
        while end < len(self.text) and self.text[end] in WHITESPACE:
            end += 1
        self._set_aside(end)

    def read_marker(self, marker: str) -> bool | None:
        """Read `marker` if it is next; returns whether it is, None if that needs more text."""
        start = self.text[self.position : self.position + len(marker)]
        if start == marker:
            self.position += len(marker)
            return True
        return None if marker.startswith(start) else False

    def read_until(self, *markers: str) -> tuple[str, str | None]:
        """Read up to and including the first of `markers`, or all text that cannot begin one.

        Returns the text before the marker, with the whitespace kept aside before it, and the
        marker, or None if there is none. Whitespace at the end of the text is kept aside.
        """
        end = len(self.text)
        found: str | None = None
        for marker in markers:
            start = self.text.find(marker, self.position, end + len(marker) - 1)
            if start >= 0:
                end, found = start, marker
        if found is None:
            end -= partial_match_length(self.text, markers, self.position)
        text = self.text[self.position : end].rstrip(WHITESPACE)
        if text:
            text_end = self.position + len(text)
            text = self.take_whitespace() + text
            self.position = text_end
        self._set_aside(end)
        if found is not None:
            self.position += len(found)
        return text, found

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
