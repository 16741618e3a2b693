"""Sums over instances are right: of two schedulers, only the leader exports the queue."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack

from services.common.etcd import Store
from services.scheduler.app import serve
from services.scheduler.config import SchedulerConfig
from tests.support.control_plane import (
    LEASE_TTL_S,
    FakeGateway,
    FakeWorker,
    service_address,
    serving,
    worker_in_group,
    worker_record,
)
from tests.support.exposition import Samples, samples
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve.cli.local_cluster import fetch


async def scrape(port: int) -> Samples:
    """The metrics at a port; empty while no server listens there."""
    try:
        text = await asyncio.to_thread(fetch, f"http://127.0.0.1:{port}/metrics")
    except OSError:
        return {}
    return samples(text.decode())


async def total(ports: Sequence[int], name: str) -> float:
    """A metric, summed over its labels and all instances."""
    scraped = [await scrape(port) for port in ports]
    return sum(
        value
        for samples_of_port in scraped
        for (which, _), value in samples_of_port.items()
        if which == name
    )


async def test_only_the_newest_scheduler_exports_the_queue(store: Store) -> None:
    record = worker_record()
    worker = FakeWorker(record)
    worker.load.kv_blocks_free = 0
    ports: list[int] = []

    async def start(stack: AsyncExitStack) -> None:
        ports.append(free_port())
        config = SchedulerConfig(
            etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, metrics_port=ports[-1]
        )
        await stack.enter_async_context(serving(serve, config))

    async def leaders() -> list[float]:
        return [await total([port], "tideserve_scheduler_leader") for port in ports]

    async with AsyncExitStack() as first, worker_in_group(store, record):
        await start(first)
        await eventually(lambda: is_(leaders, [1]))
        async with AsyncExitStack() as second:
            before = await service_address(store, "scheduler")
            await start(second)
            await eventually(lambda: is_(leaders, [0, 1]))
            newest = await service_address(store, "scheduler")
            assert newest != before
            async with (
                worker.reporting(newest),
                worker.reporting(before),
                FakeGateway.connected(newest) as gateway,
            ):
                for request_id in ("r1", "r2", "r3"):
                    await gateway.ask(request_id)
                    await gateway.ticket(request_id)

                async def waiting() -> float:
                    return await total(ports, "vllm:num_requests_waiting")

                await eventually(lambda: is_(waiting, 3))
                assert await total(ports, "tideserve_scheduler_queued_requests") == 3

                async def groups() -> float:
                    return await total(ports, "tideserve_scheduler_groups_known")

                await eventually(lambda: is_(groups, 1))
                engines = [labels for name, labels in await scrape(ports[1]) if "waiting" in name]
                assert engines == [(("engine", "queue"), ("model_name", record.model))]
        # The standby is the newest now.
        del ports[1]
        await eventually(lambda: is_(leaders, [1]))


async def is_(ask: Callable[[], Awaitable[object]], expected: object) -> bool:
    """Whether `ask` returns `expected`."""
    return await ask() == expected
