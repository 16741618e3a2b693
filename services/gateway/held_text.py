"""Text that streams, of which the end may belong to something that is still to come."""

from collections.abc import Sequence


def undecided(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that a mark begins with, without being all of it."""
    for length in range(min(max(map(len, marks), default=1) - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(mark.startswith(end) for mark in marks):
            return length
    return 0


def blank_end(text: str) -> int:
    """Length of the blanks at the end of `text`."""
    return len(text) - len(text.rstrip(" \t\r\n"))
