"""Ends a block of the current task from outside, with an error of the caller's choice."""

import asyncio
from types import TracebackType

from services.gateway.vocabulary.errors import GatewayError, first_gateway_error


class Interruption:
    """A block that others may end: ``with Interruption() as interruption: ...``.

    Unlike a guard in a task group it costs no task. It works as `asyncio.timeout` does: the task is
    cancelled, and at the end of the block the cancellation becomes the error.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._over = False

    def __enter__(self) -> "Interruption":
        """Begin, within a task."""
        task = asyncio.current_task()
        assert task is not None, "only a task can be interrupted"
        self._task, self._before = task, task.cancelling()
        return self

    def interrupt(self, error: Exception) -> None:
        """End the block with `error`, from another task or a callback; only the first one counts.

        Once the block is over it has no effect.
        """
        if self._error is None and not self._over:
            self._error = error
            self._task.cancel()

    def interrupt_after(self, delay_s: float, error: Exception) -> None:
        """End the block with `error` after `delay_s`, unless it is over by then."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(delay_s, self.interrupt, error))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raise the error if it ended the block; a task that was also cancelled stays so."""
        self._over = True
        for timer in self._timers:
            timer.cancel()
        if self._error is None:
            return
        must_end = self._task.uncancel() > self._before
        if isinstance(raised, asyncio.CancelledError) and must_end:
            return
        # Errors on the way out, caused by the interruption or not, say less than it does.
        if isinstance(raised, asyncio.CancelledError | GatewayError) or (
            isinstance(raised, BaseExceptionGroup) and first_gateway_error(raised) is not None
        ):
            raise self._error from None
