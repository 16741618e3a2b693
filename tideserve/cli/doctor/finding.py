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


def fine(check: str, sentence: str) -> Finding:
    """The check found nothing wrong."""
    return Finding(check, Level.OK, sentence)


def warning(check: str, sentence: str) -> Finding:
    """It works, and may not for long."""
    return Finding(check, Level.WARNING, sentence)


def failure(check: str, sentence: str) -> Finding:
    """It does not work so."""
    return Finding(check, Level.FAILURE, sentence)
