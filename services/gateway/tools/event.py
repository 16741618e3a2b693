"""Events that parsers emit from a model's output: content, reasoning and tool calls."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from services.gateway.text.text_buffer import TextBuffer


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning, which precedes the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The model begins to call the tool `name`; `index` counts the calls from 0.

    `id` is the id that the model gave the call, or empty.
    """

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the JSON object with the arguments of call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` has ended; not `complete` if the text ended or became invalid within it."""

    index: int
    complete: bool = True


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """Turns streamed text into events, independently of how the text is split into pieces."""

    def push(self, text: str) -> list[Event]:
        """Parse the next piece; text that may be the beginning of a marker is held back."""

    def finish(self) -> list[Event]:
        """Return the events of the text held back; call once, at the end of the output."""


class BufferedParser(ABC):
    """Base of parsers that buffer text and read the buffer step by step."""

    def __init__(self) -> None:
        self._buffer = TextBuffer()

    def push(self, text: str) -> list[Event]:
        self._buffer.add(text)
        events: list[Event] = []
        while not self._buffer.exhausted and self._advance(events):
            pass
        return events

    @abstractmethod
    def _advance(self, events: list[Event]) -> bool:
        """Read from the buffer; return whether to call it again before more text arrives."""
