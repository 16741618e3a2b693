"""SIGINT, SIGTERM and SIGHUP as requests to stop, whatever was ignored or blocked at the start."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType


class StopRequested(BaseException):
    """Raised out of an interruptible step. No Exception, so that no handler keeps it by mistake."""


class StopSignals:
    """Counts requests to stop. A shell that puts a job in the background ignores SIGINT for it."""

    def __init__(self) -> None:
        self._count = 0
        self._parent_reason: str | None = None
        self._own_signal = False
        self._interrupting = False

    def install(self) -> None:
        """Take the signals over; SIGHUP stays ignored if it was, which is what nohup is for."""
        numbers = {signal.SIGINT, signal.SIGTERM}
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            numbers.add(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    @property
    def stopping(self) -> bool:
        """Whether somebody asked to stop."""
        return self._count > 0 or self._parent_reason is not None

    @property
    def hurry(self) -> bool:
        """Whether somebody asked for a second time."""
        return self._count > 1

    @property
    def reason(self) -> str:
        """Why the cluster stops, for people."""
        return self._parent_reason or "asked to stop"

    def request(self, reason: str) -> None:
        """Ask to stop because of the parent; may be called from any thread.

        This never counts as the second request: a Ctrl-C reaches make and this process alike.
        """
        self._parent_reason = reason
        self._own_signal = True
        os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within this block a request to stop raises StopRequested wherever the code stands."""
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
