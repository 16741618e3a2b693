"""Outboxes are bounded, and a gateway's requests outlive its stream by the grace time."""

import asyncio

from services.common.clock import monotonic_s
from services.core.scheduler.state import SchedulerState
from services.core.scheduler.vocabulary import Asked, SendTicket
from services.scheduler.driver import GatewayOutbox, SchedulerDriver
from tests.support.waiting import eventually


def driver(grace_s: float = 0.0, outbox_limit: int = 8) -> SchedulerDriver:
    return SchedulerDriver(SchedulerState(8, 120.0), outbox_limit, grace_s)


def ask(stream_id: int, request_id: str = "r1") -> Asked:
    return Asked(request_id, "m", 1, 1, now_s=monotonic_s(), stream_id=stream_id)


async def test_an_outbox_returns_commands_in_order() -> None:
    outbox = GatewayOutbox(1, limit=3)
    sent = [SendTicket(1, f"r{number}") for number in range(3)]
    for command in sent:
        outbox.put(command)
    assert await outbox.take(30.0) == sent
    assert await outbox.take(0.0) == []


async def test_an_outbox_that_overflows_is_closed() -> None:
    outbox = GatewayOutbox(1, limit=2)
    for number in range(4):
        outbox.put(SendTicket(1, f"r{number}"))
    assert outbox.overflowed
    assert outbox.closed
    assert len(await outbox.take(30.0)) == 2
    assert await outbox.take(30.0) == []


async def test_closing_wakes_the_writer() -> None:
    outbox = GatewayOutbox(1, limit=2)
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        taking = tasks.create_task(outbox.take(60.0))
        await asyncio.sleep(0)
        outbox.close()
    assert taking.result() == []


async def test_requests_of_a_lost_gateway_are_dropped_after_the_grace_period() -> None:
    made = driver(grace_s=0.0)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.run())
        with made.gateway_stream() as outbox:
            made.apply(ask(outbox.stream_id))
        await eventually(lambda: made.snapshot.withdrawn_total)
        running.cancel()
    assert made.snapshot.queued == 0


async def test_draining_ends_streams_old_and_new() -> None:
    made = driver()
    with made.gateway_stream() as before:
        made.drain()
        assert before.closed
    with made.gateway_stream() as after:
        assert after.closed
        assert after.stream_id != before.stream_id
