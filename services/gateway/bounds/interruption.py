"""Ends what the current task does, from outside, with an error of the caller's choice."""

import asyncio
from types import TracebackType

from services.gateway.vocabulary.errors import GatewayError, first_gateway_error


class Interruption:
    """A block that others may end: ``with Interruption() as interruption: ...``.

    It costs no task, as a guard in a task group would. It works as `asyncio.timeout` does: the task
    is cancelled, and at the end of the block that becomes the error.
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
        """End the block with `error` in so many seconds, unless it is over by then."""
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(delay_s, self.interrupt, error))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Raise the error if the block was ended by it; a task that must end, too, ends."""
        self._over = True
        for timer in self._timers:
            timer.cancel()
        if self._error is None:
            return
        must_end = self._task.uncancel() > self._before
        if isinstance(raised, asyncio.CancelledError) and must_end:
            return
        # What failed on the way out, because of it or beside it, tells less than it does.
        if isinstance(raised, asyncio.CancelledError | GatewayError) or (
            isinstance(raised, BaseExceptionGroup) and first_gateway_error(raised) is not None
        ):
            raise self._error from None
