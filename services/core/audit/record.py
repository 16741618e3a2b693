"""Entries of the event logs, and their kinds."""

from typing import Any, Protocol

EVENT = "event"
COMMAND = "command"
BATCH = "batch"
"""A microbatch, or None, is the answer to a call of a planner's `plan`."""
CHANGE = "change"
"""A call of another method of a planner, see `core.planner.changes`."""
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
        """The event, command, batch, change or fact."""
        ...
