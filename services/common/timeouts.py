"""A timeout that ends in TimeoutError under every Python that we run on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def timeout(delay_s: float) -> AsyncIterator[asyncio.Timeout]:
    """`asyncio.timeout`, to be used in its place everywhere but in tests.

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
