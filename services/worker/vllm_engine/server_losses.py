"""Counts the losses of upstream servers under a request. Pure."""

from dataclasses import dataclass

FORGOTTEN_AFTER = 1000
"""Output tokens without a loss after which earlier losses no longer count."""


@dataclass(slots=True)
class LossCount:
    """Losses of upstream servers under a request; those long before are forgotten.

    `count` begins with the losses at earlier workers.
    """

    count: int = 0
    _output: int = 0  # output tokens at the last loss

    def note(self, output: int) -> None:
        """The server was lost after `output` tokens."""
        if output - self._output >= FORGOTTEN_AFTER:
            self.count = 0
        self._output = output
        self.count += 1
