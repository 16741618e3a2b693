"""A gateway that stops: first it says so, then it refuses, in the end it cuts."""

import asyncio

import pytest

from services.gateway.bounds.drain import Drain
from services.gateway.bounds.interruption import Interruption
from services.gateway.vocabulary.errors import QueueFull, ShuttingDown


async def test_it_leaves_before_it_drains() -> None:
    drain = Drain(inflight_max=1)
    await drain.leave(delay_s=0.0)
    assert drain.leaving and not drain.draining
    with drain.enter():
        assert drain.inflight == 1
        with pytest.raises(QueueFull), drain.enter():
            pass
    await drain.drain(timeout_s=60.0)
    with pytest.raises(ShuttingDown), drain.enter():
        pass
    with pytest.raises(ShuttingDown), Interruption() as interruption, drain.cuts(interruption):
        pass


async def test_without_a_delay_it_leaves_with_the_drain() -> None:
    drain = Drain(inflight_max=1)
    with (
        drain.enter(),
        pytest.raises(ShuttingDown, match="before the request ended"),
        Interruption() as interruption,
        drain.cuts(interruption),
    ):
        draining = asyncio.create_task(drain.drain(timeout_s=0.0, grace_s=0.0))
        await asyncio.get_running_loop().create_future()
    await draining
    assert drain.leaving and drain.draining
