"""A stopping gateway deregisters, then refuses requests, then cancels them."""

import asyncio

import pytest

from services.core.service import ServiceClass
from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.bounds.drain import Drain
from services.gateway.vocabulary.errors import QueueFull, ShuttingDown


async def test_the_gateway_deregisters_before_it_drains() -> None:
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
    with (
        pytest.raises(ShuttingDown),
        CancelScope() as cancel_scope,
        drain.cancel_on_drain_timeout(cancel_scope),
    ):
        pass


def test_batch_requests_use_only_part_of_the_drain_time() -> None:
    drain = Drain(inflight_max=3, batch_inflight_max=1)
    with drain.enter() as slot:
        for _ in range(2):
            slot.set_class(ServiceClass.BATCH)
        assert drain.batch_inflight == 1, "a place counts once"
        with drain.enter() as other:
            with pytest.raises(QueueFull, match="of class 'batch'"):
                other.set_class(ServiceClass.BATCH)
            other.set_class(ServiceClass.STANDARD)
            with drain.enter() as third:
                third.set_class(ServiceClass.INTERACTIVE)
                assert (drain.inflight, drain.batch_inflight) == (3, 1)
    assert drain.inflight == drain.batch_inflight == 0


async def test_the_gateway_deregisters_at_the_drain_without_a_delay() -> None:
    drain = Drain(inflight_max=1)
    with (
        drain.enter(),
        pytest.raises(ShuttingDown, match="before the request completed"),
        CancelScope() as cancel_scope,
        drain.cancel_on_drain_timeout(cancel_scope),
    ):
        draining = asyncio.create_task(drain.drain(timeout_s=0.0, grace_s=0.0))
        await asyncio.get_running_loop().create_future()
    await draining
    assert drain.leaving and drain.draining
