"""Findings of the checks."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding; a failure sets exit code 1."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence of a check; for a fault, with cause and remedy."""

    check: str
    level: Level
    sentence: str


@dataclass(frozen=True, slots=True)
class Check:
    """A named check, which creates its findings."""

    name: str

    def fine(self, sentence: str) -> Finding:
        """A finding without a fault."""
        return Finding(self.name, Level.OK, sentence)

    def warning(self, sentence: str) -> Finding:
        """A finding about a future or partial fault."""
        return Finding(self.name, Level.WARNING, sentence)

    def failure(self, sentence: str) -> Finding:
        """A finding about a fault that breaks the cluster."""
        return Finding(self.name, Level.FAILURE, sentence)
