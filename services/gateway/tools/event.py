"""Events found in a model's text, piece by piece: text, reasoning, calls of tools."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

from services.gateway.text.held_text import HeldText


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The model calls the tool `name`; calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON object that holds the arguments of call `index`."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Nothing more comes of call `index`. Each call that begins ends, cut short or not."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """Text in, events out. The events in all never depend on how the text was cut."""

    def push(self, text: str) -> list[Event]:
        """The events of more text; some of it may be held back until it is decided."""

    def finish(self) -> list[Event]:
        """The events of what was held back; call once, at the end of the text."""


class HeldParser(ABC):
    """The `push` of a Parser that reads what it holds, step by step."""

    def __init__(self) -> None:
        self._held = HeldText()

    def push(self, text: str) -> list[Event]:
        self._held.add(text)
        events: list[Event] = []
        while not self._held.over and self._advance(events):
            pass
        return events

    @abstractmethod
    def _advance(self, events: list[Event]) -> bool:
        """Read some text; False if it needs more."""
