"""Entries of event logs, their kinds, and the findings of an audit."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

VIOLATIONS_MAX = 100
"""Violations that are kept: a defect can break an invariant with every token."""


@dataclass(slots=True)
class Findings:
    """The outcome of an audit; a violation is a sentence that starts with its invariant."""

    checks: Counter[str] = field(default_factory=Counter)  # by invariant
    violations: list[str] = field(default_factory=list)  # the first `VIOLATIONS_MAX`
    broken: int = 0  # all violations

    def check(self, invariant: str, holds: bool, sentence: str, *parts: object) -> None:
        """Count a check; if it fails, record `sentence`, formatted with `parts`."""
        self.checks[invariant] += 1
        if holds:
            return
        self.broken += 1
        if len(self.violations) < VIOLATIONS_MAX:
            self.violations.append(f"{invariant}: {sentence.format(*parts)}")


EVENT = "event"
COMMAND = "command"
BATCH = "batch"
"""`Planned`: a call of `plan`, with its outcome."""
FACT = "fact"
"""A fact for the audit, without effect on decisions: `core.audit.facts`."""


class Recorded(Protocol):
    """An entry of an event log."""

    @property
    def kind(self) -> str:
        """A kind above."""
        ...

    @property
    def value(self) -> Any:
        """The event, command, batch or fact."""
        ...
