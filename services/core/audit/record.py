"""Entries of the event logs, and their kinds."""

from typing import Any, Protocol

EVENT = "event"
COMMAND = "command"
BATCH = "batch"
"""`Planned`: a call of `plan`, with its answer."""
FACT = "fact"
"""A fact, on which no decision rests: `core.audit.facts`."""


class Recorded(Protocol):
    """An entry of an event log."""

    @property
    def kind(self) -> str:
        """One of the kinds above."""
        ...

    @property
    def value(self) -> Any:
        """The event, command, batch or fact."""
        ...
