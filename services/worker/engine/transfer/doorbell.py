"""A file descriptor that is readable while work waits, so that one poll covers everything."""

import os
from contextlib import suppress


class Doorbell:
    """An eventfd; any thread may ring. Readers call `clear` before they check for work.

    In the other order a ring between the two would be lost.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._descriptor

    def ring(self) -> None:
        """Make the descriptor readable. No effect after `close`."""
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make it unreadable until the next ring. No effect after `close`."""
        if self._descriptor >= 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
