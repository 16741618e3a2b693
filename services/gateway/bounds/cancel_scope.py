"""A cancel scope that raises a given error, for timeouts, disconnects and cancellations."""

import asyncio
from types import TracebackType

from services.gateway.vocabulary.errors import GatewayError, first_gateway_error


class CancelScope:
    """A block that other tasks may cancel: ``with CancelScope() as scope: ...``.

    Works like `asyncio.timeout`: it cancels the task and converts the CancelledError into the given
    error at the end of the block. It needs no extra task.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._over = False

    def __enter__(self) -> "CancelScope":
        """Enter the scope; only within a task."""
        task = asyncio.current_task()
        assert task is not None, "the scope needs a task"
        self._task, self._before = task, task.cancelling()
        return self

    def cancel(self, error: Exception) -> None:
        """Cancel the block; it raises `error`. Further calls, and calls after it, do nothing."""
        if self._error is None and not self._over:
            self._error = error
            self._task.cancel()

    def cancel_after(self, delay_s: float, error: Exception) -> None:
        """Cancel the block with `error` after `delay_s`."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(delay_s, self.cancel, error))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raise the error if it cancelled the block. A cancellation from outside has priority."""
        self._over = True
        for timer in self._timers:
            timer.cancel()
        if self._error is None:
            return
        cancelled_outside = self._task.uncancel() > self._before
        if isinstance(raised, asyncio.CancelledError) and cancelled_outside:
            return
        # Also replace errors of the block's cleanup, which would hide the cancellation's cause.
        if isinstance(raised, asyncio.CancelledError | GatewayError) or (
            isinstance(raised, BaseExceptionGroup) and first_gateway_error(raised) is not None
        ):
            raise self._error from None
