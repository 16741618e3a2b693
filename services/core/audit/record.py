"""Entries of the event logs, and their kinds."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

VIOLATIONS_MAX = 100
"""One defect may break an invariant with every token; the first sentences tell it."""


@dataclass(slots=True)
class Findings:
    """`checks` counts by invariant; a violation is a sentence that begins with its invariant."""

    checks: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    broken: int = 0

    def check(self, invariant: str, holds: bool, sentence: str, *parts: object) -> None:
        """Count a check; `sentence` is a format of `parts` and says what is wrong otherwise."""
        self.checks[invariant] += 1
        if holds:
            return
        self.broken += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{invariant}: {sentence.format(*parts)}")


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
