"""Types shared by all parts of an audit: entries of event logs, and findings.

A service's event log records the events and commands of its state machine, and facts. An audit
reads the logs of a run and checks the invariants (`audit.py`).
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

VIOLATIONS_MAX = 100
"""Maximum number of violations that are kept: a defect can break an invariant with every token."""


@dataclass(slots=True)
class Findings:
    """The outcome of an audit; a violation is a sentence that starts with its invariant."""

    checks: Counter[str] = field(default_factory=Counter)  # number of checks by invariant
    violations: list[str] = field(default_factory=list)  # the first `VIOLATIONS_MAX`
    broken: int = 0  # number of all violations

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
"""A `Planned` entry: a call of a planner's `plan`, with the microbatch that it returned, if any."""
FACT = "fact"
"""An entry only for audits, which no state machine reads: see `core.audit.facts`."""


class Recorded(Protocol):
    """An entry of an event log."""

    @property
    def kind(self) -> str:
        """`EVENT`, `COMMAND`, `BATCH` or `FACT`."""
        ...

    @property
    def value(self) -> Any:
        """The event, command, batch or fact."""
        ...
