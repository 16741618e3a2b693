"""Turns SIGINT, SIGTERM and SIGHUP into stop requests, even if they were ignored or blocked."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequested(BaseException):
    """Interrupts a step. A BaseException, so that no `except Exception` swallows it."""


class StopSignals:
    """Counts stop requests. `install` undoes that shells ignore SIGINT for background jobs."""

    def __init__(self) -> None:
        self._count = 0
        self._parent_reason: str | None = None
        self._own_signal = False
        self._interrupting = False

    def install(self) -> None:
        """Install the handlers. SIGHUP stays ignored under nohup."""
        numbers = {signal.SIGINT, signal.SIGTERM}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.add(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    @property
    def stopping(self) -> bool:
        """Whether a stop was requested."""
        return self._count > 0 or self._parent_reason is not None

    @property
    def hurry(self) -> bool:
        """Whether a stop was requested twice."""
        return self._count > 1

    @property
    def reason(self) -> str:
        """Why the cluster stops, for messages."""
        return self._parent_reason or "asked to stop"

    def request(self, reason: str) -> None:
        """Request a stop because the parent ended. Thread-safe.

        Never counts as a second request: a Ctrl-C reaches both make and this process.
        """
        self._parent_reason = reason
        self._own_signal = True
        os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise StopRequested in this block as soon as a stop is requested."""
        self._interrupting = True
        try:
            if self.stopping:
                raise StopRequested
            yield
        finally:
            self._interrupting = False

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._own_signal and number == signal.SIGTERM:
            self._own_signal = False
        else:
            self._count += 1
        if self._interrupting:
            self._interrupting = False
            raise StopRequested
