import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from services.common.timeouts import timeout, timeout_by_marks

both = pytest.mark.parametrize("limit", [timeout, timeout_by_marks])
Timeout = Callable[[float], AbstractAsyncContextManager[asyncio.Timeout]]


async def fail() -> None:
    raise ValueError


async def wait_forever() -> None:
    await asyncio.Event().wait()


@both
async def test_timeout_raises_timeout_error(limit: Timeout) -> None:
    with pytest.raises(TimeoutError):
        async with limit(0):
            await wait_forever()


@both
async def test_timeout_expires_in_a_task_of_a_failed_group(limit: Timeout) -> None:
    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
    with pytest.raises(TimeoutError):
        async with limit(0):
            await wait_forever()


@both
@pytest.mark.parametrize("group_failed", [False, True])
async def test_an_outside_cancellation_is_not_a_timeout(limit: Timeout, group_failed: bool) -> None:
    waiting = asyncio.Event()

    async def wait() -> None:
        if group_failed:
            with pytest.raises(ExceptionGroup):
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail())
        async with limit(300):
            waiting.set()
            await wait_forever()

    task = asyncio.create_task(wait())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@both
async def test_an_outside_cancellation_takes_precedence_over_expiry(limit: Timeout) -> None:
    async def wait() -> None:
        async with limit(0):
            try:
                await wait_forever()
            except asyncio.CancelledError:
                task.cancel()
                await asyncio.sleep(0)

    task = asyncio.create_task(wait())
    with pytest.raises(asyncio.CancelledError):
        await task


@both
async def test_other_errors_propagate(limit: Timeout) -> None:
    with pytest.raises(ValueError, match="own"):
        async with limit(300):
            raise ValueError("own")
    async with limit(300) as scope:
        pass
    assert not scope.expired()
