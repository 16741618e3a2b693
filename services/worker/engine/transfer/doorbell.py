"""Wakes a thread that polls file descriptors, by a descriptor that is readable while work waits."""

import os
from contextlib import suppress
from weakref import finalize


class Doorbell:
    """An eventfd; any thread may ring. The woken thread calls `clear` before it checks for work.

    In the other order, a ring between the two calls would be lost. A doorbell that is no longer
    referenced is closed.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._close = finalize(self, os.close, self._descriptor)

    def fileno(self) -> int:
        """The descriptor to poll for reading."""
        return self._descriptor

    def ring(self) -> None:
        """Make the descriptor readable. No effect after `close`."""
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable until the next ring. No effect after `close`."""
        if self._descriptor >= 0:
            with suppress(BlockingIOError):
                os.eventfd_read(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        self._descriptor = -1
        self._close()
