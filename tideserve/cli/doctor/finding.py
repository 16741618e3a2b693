"""What a check found."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is; a failure makes the command end with 1."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence of a check; of what is wrong it says cause and remedy."""

    check: str
    level: Level
    sentence: str


@dataclass(frozen=True, slots=True)
class Check:
    """A check by its name, and how it tells what it found."""

    name: str

    def fine(self, sentence: str) -> Finding:
        """The check found nothing wrong."""
        return Finding(self.name, Level.OK, sentence)

    def warning(self, sentence: str) -> Finding:
        """It works, and may not for long."""
        return Finding(self.name, Level.WARNING, sentence)

    def failure(self, sentence: str) -> Finding:
        """It does not work so."""
        return Finding(self.name, Level.FAILURE, sentence)
