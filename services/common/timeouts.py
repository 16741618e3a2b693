"""`asyncio.timeout` with the same behaviour under all supported Python versions."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def timeout_by_marks(delay_s: float) -> AsyncIterator[asyncio.Timeout]:
    """`timeout` for Python before 3.11.3.

    A task group with a failed task leaves its parent task marked as cancelling
    (python/cpython#133747). Before 3.11.3, as on Debian 12, `asyncio.timeout` mistakes an earlier
    mark for an outside cancellation, and raises CancelledError instead of TimeoutError.
    """
    before = _cancelling()
    scope = asyncio.timeout(delay_s)
    try:
        async with scope:
            yield scope
    except asyncio.CancelledError as error:
        if scope.expired() and _cancelling() <= before:
            raise TimeoutError from error
        raise


def _cancelling() -> int:
    """Cancellation requests of the current task that have not been withdrawn."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


timeout = asyncio.timeout if sys.version_info >= (3, 11, 3) else timeout_by_marks
"""`asyncio.timeout` with the behaviour of Python 3.11.3; services use only this."""


async def wait_set(event: asyncio.Event, timeout_s: float) -> None:
    """Wait until `event` is set, then clear it; returns after `timeout_s` at the latest."""
    try:
        async with timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
