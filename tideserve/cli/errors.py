"""Errors that end the `tideserve` command."""

from collections.abc import Iterator
from contextlib import contextmanager

EXIT_FAILED = 1
EXIT_UNUSABLE = 2


class CommandError(Exception):
    """Ends the command with `exit_code` and a sentence of cause and remedy on standard error."""

    def __init__(self, sentence: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


class Unreachable(CommandError):
    """The server does not answer, or breaks off its answer."""


class SystemUnavailable(Exception):
    """A server cannot be installed, started or reached; the message is a sentence."""


@contextmanager
def unusable(*kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions of these kinds into a CommandError with their message."""
    try:
        yield
    except kinds as error:
        raise CommandError(str(error), EXIT_UNUSABLE) from error
