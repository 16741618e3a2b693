"""Tool calls after a mark, anywhere in the text."""

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from services.gateway.tools.event import Content, Event, HeldParser
from services.gateway.tools.json_value import Step


class Body(Protocol):
    """What stands after a mark. `index` is that of the next call to begin.

    `undecided` is the text that no event tells of, so far.
    """

    @property
    def index(self) -> int: ...

    @property
    def undecided(self) -> str: ...

    def feed(self, text: str, at: int, events: list[Event]) -> tuple[int, Step]:
        """Take characters from `at` on, up to the end of the calls; adds to `events`.

        Returns where it ended, and whether the calls go on (MORE), have ended (LAST), or the next
        character cannot be theirs (WRONG).
        """

    def end(self, events: list[Event]) -> None:
        """The text is over or goes wrong here: a call that has begun ends."""


class _MarkMode(Enum):
    TEXT = auto()
    BODY = auto()
    CLOSE = auto()


class MarkedCalls(HeldParser):
    """A Parser of calls between marks. Blanks around calls belong to nobody.

    Text after a mark that is no call is content, the mark included.
    """

    def __init__(self, opening: str, closing: str, body: Callable[[int], Body]) -> None:
        """`closing`: the mark after a body, which may lack; `body` of the next call's index."""
        super().__init__()
        self._opening = opening
        self._closing = closing
        self._new_body = body
        self._mode = _MarkMode.TEXT
        self._body = body(0)
        # The mark and the blanks before it, until a call has begun after it.
        self._lead = ""
        # Nothing but blanks since the last call.
        self._after_call = False

    def finish(self) -> list[Event]:
        events: list[Event] = []
        rest = self._held.take()
        match self._mode:
            case _MarkMode.BODY:
                self._break(events)
            case _MarkMode.TEXT if not (self._after_call and not rest.strip()):
                self._content(rest, events)
        return events

    def _advance(self, events: list[Event]) -> bool:
        match self._mode:
            case _MarkMode.TEXT:
                return self._text(events)
            case _MarkMode.BODY:
                return self._calls(events)
            case _MarkMode.CLOSE:
                return self._close()

    def _text(self, events: list[Event]) -> bool:
        shown, marked = self._held.before(self._opening)
        self._content(shown, events)
        if not marked:
            return False
        self._lead = self._held.take_blanks() + self._opening
        self._body, self._mode = self._new_body(self._body.index), _MarkMode.BODY
        return True

    def _calls(self, events: list[Event]) -> bool:
        first = self._body.index
        self._held.at, step = self._body.feed(self._held.text, self._held.at, events)
        if self._body.index > first:
            self._lead, self._after_call = "", True
        if step is Step.WRONG:
            self._break(events)
            self._mode = _MarkMode.TEXT
        elif step is Step.LAST:
            self._mode = _MarkMode.CLOSE if self._closing else _MarkMode.TEXT
        return step is not Step.MORE

    def _break(self, events: list[Event]) -> None:
        """The body is no call from here on."""
        self._body.end(events)
        self._content(self._lead + self._body.undecided, events)

    def _close(self) -> bool:
        self._held.skip_blanks()
        closed = self._held.starts_with(self._closing)
        if closed is None:
            return False
        if closed:
            self._held.take_blanks()
        self._mode = _MarkMode.TEXT
        return True

    def _content(self, text: str, events: list[Event]) -> None:
        if text:
            self._after_call = False
            events.append(Content(text))
