"""Errors with which the `tideserve` command ends."""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_FAILED = 1
EXIT_UNUSABLE = 2


class CommandError(Exception):
    """Ends the command with one sentence on standard error, cause and remedy, and `exit_code`."""

    def __init__(self, sentence: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Unreachable(CommandError):
    """Nobody answers there, or not to the end."""


class SystemUnavailable(Exception):
    """A server cannot be installed, started or reached; the message is one sentence."""


@contextmanager
def unusable(*kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds, which say what cannot be used and why, end the command."""
    try:
        yield
    except kinds as error:
        raise CommandError(str(error), EXIT_UNUSABLE) from error
