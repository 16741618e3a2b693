"""Text that streams, of which the end may belong to something that is still to come."""

from collections.abc import Sequence

BLANKS = " \t\r\n"
"""Characters between the parts of an output that belong to none."""


def undecided(text: str, marks: Sequence[str], at: int = 0) -> int:
    """Length of the longest end of `text` that a mark begins with, without being all of it.

    The end begins at `at` or later.
    """
    longest = 0
    for mark in marks:
        start = text.find(mark[0], max(at, len(text) - len(mark) + 1))
        while start >= 0 and not mark.startswith(text[start:]):
            start = text.find(mark[0], start + 1)
        if start >= 0:
            longest = max(longest, len(text) - start)
    return longest


class HeldText:
    """Text that has come and is not read, behind blanks that nobody has claimed.

    Every character is read once, however the text was cut and however long the blanks are: a
    reader advances `at`, and what it leaves at the end of a push is shorter than a mark.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self._blanks: list[str] = []

    def add(self, text: str) -> None:
        """More text has come."""
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def over(self) -> bool:
        """Whether all text has been read."""
        return self.at == len(self.text)

    def skip_blanks(self) -> None:
        """Read the blanks that come next, and hold them."""
        end = self.at
        while end < len(self.text) and self.text[end] in BLANKS:
            end += 1
        self._hold(end)

    def starts_with(self, mark: str) -> bool | None:
        """Whether a mark comes next, which is read then; None if more text must tell."""
        start = self.text[self.at : self.at + len(mark)]
        if start == mark:
            self.at += len(mark)
            return True
        return None if mark.startswith(start) else False

    def before(self, mark: str) -> tuple[str, bool]:
        """Read the text up to a mark, or all that cannot be the beginning of one.

        Returns the text that is shown, held blanks before it included, and whether the mark came,
        which is read then. Blanks at the end of the text are held.
        """
        start = self.text.find(mark, self.at)
        end = len(self.text) - undecided(self.text, (mark,), self.at) if start < 0 else start
        shown = self.text[self.at : end].rstrip(BLANKS)
        if shown:
            shown_end = self.at + len(shown)
            shown = self.take_blanks() + shown
            self.at = shown_end
        self._hold(end)
        if start < 0:
            return shown, False
        self.at += len(mark)
        return shown, True

    def take_blanks(self) -> str:
        """The blanks that were held, which are no longer."""
        taken = "".join(self._blanks)
        self._blanks.clear()
        return taken

    def take(self) -> str:
        """All that is held and not read."""
        taken = self.take_blanks() + self.text[self.at :]
        self.at = len(self.text)
        return taken

    def _hold(self, end: int) -> None:
        """Read the blanks up to `end`."""
        if end > self.at:
            self._blanks.append(self.text[self.at : end])
            self.at = end
