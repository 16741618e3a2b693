"""Owners alternate at a semaphore with a few slots."""

import asyncio
import random

import pytest

from services.gateway.structure.fair_semaphore import FairSemaphore
from services.gateway.vocabulary.errors import QueueFull
from tests.support.waiting import settle


async def test_owners_alternate_and_the_queue_is_bounded() -> None:
    turns, order = FairSemaphore(1, 1, 3, "x"), list[str]()
    over = asyncio.Event()

    async def work(owner: str, name: str) -> None:
        async with turns.slot(owner):
            order.append(name)
            await over.wait()

    names = ["a1", "a2", "a3", "a4", "b1", "b2", "c1"]
    tasks = {}
    for name in names:
        tasks[name] = asyncio.create_task(work(name[0], name))
        await settle()
    with pytest.raises(QueueFull):
        await work("a", "a5")
    over.set()
    await asyncio.gather(*tasks.values())
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_single_owner_cannot_fill_the_queue() -> None:
    turns, inside = FairSemaphore(4, 2, 9, "x"), list[str]()
    over = {owner: asyncio.Event() for owner in "abc"}

    async def work(owner: str) -> None:
        async with turns.slot(owner):
            inside.append(owner)
            await over[owner].wait()
        inside.remove(owner)

    tasks = [asyncio.create_task(work(owner)) for owner in "aaaabccc"]
    await settle()
    assert inside == ["a", "a", "b", "c"]
    over["b"].set()
    await settle()
    assert inside == ["a", "a", "c", "c"], "a has as many as one may have"
    over["c"].set()
    await settle()
    assert inside == ["a", "a"] and turns.taken == 2
    over["a"].set()
    await asyncio.gather(*tasks)
    assert turns.taken == 0


@pytest.mark.parametrize("seed", range(30))
async def test_random_cancellations_leak_no_place(seed: int) -> None:
    rng = random.Random(seed)
    turns, inside, most = FairSemaphore(2, 2, 100, "x"), 0, 0
    loop = asyncio.get_running_loop()

    async def work() -> None:
        nonlocal inside, most
        async with turns.slot(rng.choice("abc")) as slot:
            inside += 1
            most = max(most, inside)
            try:
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
            finally:
                if rng.random() < 0.5:
                    slot.work = loop.create_future()
                    loop.call_soon(work_ends, slot.work)
                else:
                    inside -= 1

    def work_ends(work: asyncio.Future[None]) -> None:
        nonlocal inside
        inside -= 1
        work.set_result(None)

    errors = list[object]()
    loop.set_exception_handler(lambda _, context: errors.append(context))
    tasks = []
    for _ in range(80):
        tasks.append(asyncio.create_task(work()))
        if rng.random() < 0.6:
            rng.choice(tasks).cancel()
        if rng.random() < 0.5:
            await asyncio.sleep(0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends)
    await settle()
    assert inside == 0 and most == 2 and not errors
    async with turns.slot("a"), turns.slot("b"):
        third = asyncio.create_task(work())
        await settle()
        assert not third.done(), "there are two places still, and no more"
    await third
