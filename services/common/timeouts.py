"""A timeout that ends in TimeoutError under every Python that we run on."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def timeout_by_marks(delay_s: float) -> AsyncIterator[asyncio.Timeout]:
    """`timeout` for Pythons before 3.11.3.

    A task group one of whose tasks failed leaves its own task marked as being cancelled
    (python/cpython#133747). Before 3.11.3, so on Debian 12, `asyncio.timeout` takes a mark from
    before for a cancellation from outside and ends the task, where TimeoutError is due.
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
    """Requests to cancel the current task that nobody has taken back."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


timeout = asyncio.timeout if sys.version_info >= (3, 11, 3) else timeout_by_marks
"""`asyncio.timeout`, as it has been since Python 3.11.3; for everything but tests."""


async def wait_set(event: asyncio.Event, timeout_s: float) -> None:
    """Return when `event` is set, which it then no longer is, or after `timeout_s`."""
    try:
        async with timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
