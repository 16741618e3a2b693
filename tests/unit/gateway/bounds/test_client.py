"""Stalled clients are detected, however many sends wait."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.bounds.client import ClientGone, WatchedClient


async def never_served(client: WatchedClient[int]) -> None:
    """Raise ClientGone once the client is found to stall."""
    with CancelScope() as cancel_scope, client.watched(cancel_scope):
        await asyncio.get_running_loop().create_future()


async def stalls(client: WatchedClient[int], sending: Coroutine[Any, Any, None]) -> None:
    """Check that the client is found to stall during the given work."""
    task = asyncio.create_task(sending)
    with pytest.raises(ClientGone):
        async with asyncio.timeout(20):
            await never_served(client)
    task.cancel()
    await asyncio.wait([task])


async def test_a_stalled_send_is_detected_while_others_start() -> None:
    turn = asyncio.Lock()

    async def stuck(message: int) -> None:
        async with turn:
            await asyncio.get_running_loop().create_future()

    client = WatchedClient(stuck, stall_s=0.2)

    async def ask_on() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(10_000):
                tasks.create_task(client.send(number))
                await asyncio.sleep(0.01)

    await stalls(client, ask_on())


async def test_a_slow_reader_is_not_disconnected() -> None:
    turn, taken = asyncio.Lock(), asyncio.Semaphore(0)

    async def slow(message: int) -> None:
        async with turn:
            await taken.acquire()

    client = WatchedClient(slow, stall_s=0.4)
    sends = [asyncio.create_task(client.send(number)) for number in range(64)]
    watch = asyncio.create_task(never_served(client))
    for _ in range(64):
        taken.release()
        await asyncio.sleep(0.02)
    await asyncio.gather(*sends)
    # 1.28 s of sends, none of which took long.
    assert not watch.done()
    watch.cancel()


async def test_cancelled_sends_are_not_progress() -> None:
    async def stuck(message: int) -> None:
        await asyncio.get_running_loop().create_future()

    client = WatchedClient(stuck, stall_s=0.2)
    held = asyncio.create_task(client.send(0))

    async def give_up() -> None:
        while True:
            send = asyncio.create_task(client.send(1))
            await asyncio.sleep(0.01)
            send.cancel()

    await stalls(client, give_up())
    held.cancel()
