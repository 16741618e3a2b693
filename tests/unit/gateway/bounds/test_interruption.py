"""A block is ended from outside, by an error of the caller's, and its task goes on."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.gateway.bounds.interruption import Interruption
from services.gateway.vocabulary.errors import CancelledByClient, EngineFailed, GatewayError

GONE = CancelledByClient("gone")


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def soon(interruption: Interruption, error: Exception = GONE) -> None:
    asyncio.get_running_loop().call_soon(interruption.interrupt, error)


async def test_the_block_ends_with_the_first_error_and_the_task_goes_on() -> None:
    with pytest.raises(CancelledByClient, match="gone"), Interruption() as interruption:
        soon(interruption)
        soon(interruption, EngineFailed("late"))
        await never()
    interruption.interrupt(GONE)
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_time_ends_it_and_leaving_it_ends_the_timer() -> None:
    with pytest.raises(CancelledByClient), Interruption() as interruption:
        interruption.interrupt_after(0.0, GONE)
        await never()
    with Interruption() as interruption:
        interruption.interrupt_after(0.0, GONE)
    await asyncio.sleep(0.01)


async def test_what_fails_on_the_way_out_does_not_hide_the_error() -> None:
    async def fail() -> None:
        try:
            await never()
        finally:
            raise EngineFailed("aborted")

    for inner in (fail, in_group(fail)):
        with pytest.raises(CancelledByClient), Interruption() as interruption:
            soon(interruption)
            await inner()


def in_group(
    function: Callable[[], Coroutine[Any, Any, None]],
) -> Callable[[], Coroutine[Any, Any, None]]:
    async def run() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(function())
            await never()

    return run


async def test_errors_of_our_own_and_of_the_block_pass() -> None:
    async def wrong() -> None:
        try:
            await never()
        finally:
            raise KeyError("a defect")

    with pytest.raises(KeyError), Interruption() as interruption:
        soon(interruption)
        await wrong()
    with pytest.raises(GatewayError, match="its own"), Interruption():
        raise EngineFailed("its own")


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_task_that_must_end_ends(interrupted: bool) -> None:
    begun = asyncio.Event()

    async def run() -> None:
        with Interruption() as interruption:
            if interrupted:
                soon(interruption)
            begun.set()
            await never()

    task = asyncio.create_task(run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_group_around_it_that_fails_is_no_interruption() -> None:
    async def fail() -> None:
        raise EngineFailed("beside it")

    with pytest.raises(BaseExceptionGroup) as raised:
        async with asyncio.TaskGroup() as tasks:
            with Interruption():
                tasks.create_task(fail())
                await never()
    assert raised.group_contains(EngineFailed)
