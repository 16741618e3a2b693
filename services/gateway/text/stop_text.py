"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence

from services.gateway.text.held_text import undecided


class StopText:
    """Passes text on, up to the first stop string, or to its end.

    Text that may be the beginning of a stop string is held back until that is decided. The result
    does not depend on how the text is cut into pieces: the stop string that is complete first
    wins, among those that end together the longest.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`stops`: nonempty strings; none at all is fine. `include`: the one found is shown."""
        self._include = include
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown. `hit` is the stop string found."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        found = [
            (start + len(stop), start) for stop in self._stops if (start := buffer.find(stop)) >= 0
        ]
        if found:
            end, start = min(found)
            self.hit = buffer[start:end]
            self._held = ""
            return buffer[: end if self._include else start]
        keep = undecided(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """The text that is still held back; call at the end of the output."""
        held, self._held = self._held, ""
        return held
