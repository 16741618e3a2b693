"""Errors with which the `tideserve` command ends.

CommandError   one sentence for people, cause and remedy, and an exit code
"""

EXIT_FAILED = 1
EXIT_UNUSABLE = 2


class CommandError(Exception):
    """Ends the command with a sentence on standard error and `exit_code`."""

    def __init__(self, sentence: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
