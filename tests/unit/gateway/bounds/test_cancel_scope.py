"""A block is ended from outside with an error of the caller, and its task continues."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.vocabulary.errors import CancelledByClient, EngineFailed, GatewayError

GONE = CancelledByClient("gone")


async def wait_forever() -> None:
    await asyncio.get_running_loop().create_future()


def cancel_soon(cancel_scope: CancelScope, error: Exception = GONE) -> None:
    asyncio.get_running_loop().call_soon(cancel_scope.cancel, error)


async def test_the_first_error_ends_the_block_but_not_the_task() -> None:
    with pytest.raises(CancelledByClient, match="gone"), CancelScope() as cancel_scope:
        cancel_soon(cancel_scope)
        cancel_soon(cancel_scope, EngineFailed("late"))
        await wait_forever()
    cancel_scope.cancel(GONE)
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_the_deadline_ends_the_block_and_exit_ends_the_timer() -> None:
    with pytest.raises(CancelledByClient), CancelScope() as cancel_scope:
        cancel_scope.cancel_after(0.0, GONE)
        await wait_forever()
    with CancelScope() as cancel_scope:
        cancel_scope.cancel_after(0.0, GONE)
    await asyncio.sleep(0.01)


async def test_an_error_during_cleanup_does_not_hide_the_first_error() -> None:
    async def fail() -> None:
        try:
            await wait_forever()
        finally:
            raise EngineFailed("aborted")

    for inner in (fail, in_group(fail)):
        with pytest.raises(CancelledByClient), CancelScope() as cancel_scope:
            cancel_soon(cancel_scope)
            await inner()


def in_group(
    function: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], Coroutine[Any, Any, None]]:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(function())
            await wait_forever()

    return run


async def test_errors_of_the_scope_and_of_the_block_propagate() -> None:
    async def wrong() -> None:
        try:
            await wait_forever()
        finally:
            raise KeyError("a defect")

    with pytest.raises(KeyError), CancelScope() as cancel_scope:
        cancel_soon(cancel_scope)
        await wrong()
    with pytest.raises(GatewayError, match="its own"), CancelScope():
        raise EngineFailed("its own")


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_cancelled_task_stays_cancelled(interrupted: bool) -> None:
    begun = asyncio.Event()

    async def run() -> None:
        with CancelScope() as cancel_scope:
            if interrupted:
                cancel_soon(cancel_scope)
            begun.set()
            await wait_forever()

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_failing_outer_task_group_is_not_swallowed() -> None:
    async def fail() -> None:
        raise EngineFailed("beside it")

    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            with CancelScope():
                tasks.create_task(fail())
                await wait_forever()
    assert raised.group_contains(EngineFailed)
