"""The memory manager with a real etcd and fake workers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import pytest

from services.common.config import from_mapping
from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import GROUPS, SERVICES, WORKERS, Directory
from services.common.timeouts import timeout
from services.core.scheduler.vocabulary import ShortfallsReported
from services.memmgr.app import serve
from services.memmgr.config import MemmgrConfig
from services.scheduler.app import serve as serve_scheduler
from services.scheduler.config import SchedulerConfig
from services.scheduler.shortfall_watch import ShortfallWatch
from tests.support.control_plane import (
    LEASE_TTL_S,
    SHORT_LEASE_TTL_S,
    FakeGateway,
    FakeWorker,
    group_record,
    put,
    read_group,
    registered,
    service_address,
    serving,
    worker_record,
)
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import eventually
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

KEY = f"{WORKERS}w0"


@asynccontextmanager
async def memmgr(store: Store, **changes: object) -> AsyncIterator[str]:
    """A running memory manager; yields its address."""
    options = {"etcd_url": store.url, "lease_ttl_s": LEASE_TTL_S}
    async with serving(serve, from_mapping(MemmgrConfig, options | changes, "a test")):
        yield await service_address(store, "memmgr")


async def group_becomes(store: Store, record: record_pb2.GroupRecord) -> None:
    async def same() -> bool:
        return await read_group(store, "w0") == record

    await eventually(same)


def tombstone(epoch: int) -> record_pb2.GroupRecord:
    return record_pb2.GroupRecord(
        group_id="group-w0", epoch=epoch, phase=record_pb2.GROUP_PHASE_DISSOLVED, model="m"
    )


async def test_a_registered_worker_gets_a_group(store: Store) -> None:
    async with memmgr(store) as address, registered(store, KEY, worker_record()):
        await group_becomes(store, group_record(worker_record(), epoch=1))
        async with open_channel(address) as channel:
            stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)

            async def listed() -> bool:
                answer = await stub.ListGroups(memmgr_pb2.ListGroupsRequest(), timeout=30)
                return list(answer.groups) == [group_record(worker_record(), epoch=1)]

            await eventually(listed)


async def test_a_lost_worker_leaves_a_tombstone_and_returns_with_a_higher_epoch(
    store: Store,
) -> None:
    async with memmgr(store) as address:
        async with registered(store, KEY, worker_record()):
            await group_becomes(store, group_record(worker_record(), epoch=1))
        await group_becomes(store, tombstone(epoch=2))
        async with open_channel(address) as channel:
            stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)

            async def none() -> bool:
                answer = await stub.ListGroups(memmgr_pb2.ListGroupsRequest(), timeout=30)
                return not answer.groups

            await eventually(none)
        again = worker_record(incarnation="w0-b")
        async with registered(store, KEY, again):
            await group_becomes(store, group_record(again, epoch=3))


async def test_a_restart_adopts_groups(store: Store) -> None:
    async with registered(store, KEY, worker_record(), ttl_s=30):
        async with memmgr(store):
            await group_becomes(store, group_record(worker_record(), epoch=1))
        before = (await store.list_prefix(GROUPS))[f"{GROUPS}group-w0"]
        async with memmgr(store), registered(store, f"{WORKERS}w1", worker_record("w1")):
            # Once the new instance has created w1's group, it has also read w0's.
            await eventually(lambda: read_group(store, "w1"))
            assert (await store.list_prefix(GROUPS))[f"{GROUPS}group-w0"] == before


async def test_a_worker_that_left_while_no_memory_manager_ran(store: Store) -> None:
    await put(store, f"{GROUPS}group-w0", group_record(worker_record(), epoch=7))
    async with memmgr(store):
        await group_becomes(store, tombstone(epoch=8))


async def test_two_memory_managers_agree(store: Store) -> None:
    """Both see changes at different times, so epochs may be skipped but never decrease."""
    epochs = [0]

    async def becomes(phase: int) -> bool:
        group = await read_group(store, "w0")
        if group is None or group.phase != phase or group.epoch <= epochs[-1]:
            return False
        epochs.append(group.epoch)
        return True

    async with memmgr(store), memmgr(store):
        for _ in range(3):
            async with registered(store, KEY, worker_record()):
                await eventually(lambda: becomes(record_pb2.GROUP_PHASE_STABLE))
            await eventually(lambda: becomes(record_pb2.GROUP_PHASE_DISSOLVED))


async def test_groups_stay_while_etcd_is_unreachable(store: Store, etcd: EtcdServer) -> None:
    async with (
        memmgr(store, lease_ttl_s=SHORT_LEASE_TTL_S),
        registered(store, KEY, worker_record(), ttl_s=60),
    ):
        await group_becomes(store, group_record(worker_record(), epoch=1))
        before = (await store.list_prefix(GROUPS))[f"{GROUPS}group-w0"]
        etcd.kill()
        await asyncio.sleep(5)
        etcd.start()
        # Once w1 has a group, the memory manager has recovered.
        async with registered(store, f"{WORKERS}w1", worker_record("w1")):
            await eventually(lambda: read_group(store, "w1"))
        assert (await store.list_prefix(GROUPS))[f"{GROUPS}group-w0"] == before


async def test_a_worker_that_started_while_etcd_was_unreachable(
    store: Store, etcd: EtcdServer
) -> None:
    async with memmgr(store, lease_ttl_s=SHORT_LEASE_TTL_S):
        etcd.kill()
        await asyncio.sleep(1)
        etcd.start()
        async with registered(store, KEY, worker_record()):
            await group_becomes(store, group_record(worker_record(), epoch=1))


async def test_an_unreadable_group_record_is_replaced_above_its_revision(store: Store) -> None:
    await store.put_if(f"{GROUPS}group-w0", b"\xff{", 0)
    revision = (await store.list_prefix(GROUPS))[f"{GROUPS}group-w0"].mod_revision
    async with memmgr(store), registered(store, KEY, worker_record()):
        await group_becomes(store, group_record(worker_record(), epoch=revision + 1))


class Reporter:
    """A worker's memory stream."""

    def __init__(self, address: str, **fields: object) -> None:
        self._address = address
        memory = {
            "worker_id": "w0",
            "incarnation": "w0-a",
            "budget_bytes": 2**30,
            "parameter_bytes": 2**28,
            "kv_blocks_total": 100,
            "kv_blocks_free": 40,
            "pids": [11, 12],
            "epoch": 1,
        }
        self.memory = memmgr_pb2.WorkerMemory(**(memory | fields))  # type: ignore[arg-type]

    async def __aenter__(self) -> "Reporter":
        self._channel = open_channel(self._address)
        self.call = memmgr_pb2_grpc.MemmgrServiceStub(self._channel).ReportMemory(self._reports())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()
        await self._channel.close(None)

    async def _reports(self) -> AsyncIterator[memmgr_pb2.ReportMemoryRequest]:
        while True:
            yield memmgr_pb2.ReportMemoryRequest(memory=self.memory)
            await asyncio.sleep(0.1)


async def cluster(address: str) -> memmgr_pb2.GetClusterResponse:
    async with open_channel(address) as channel:
        stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
        return await stub.GetCluster(memmgr_pb2.GetClusterRequest(), timeout=30)


async def test_the_cluster_shows_registered_workers_that_report(store: Store) -> None:
    async with (
        memmgr(store) as address,
        Reporter(address) as reporter,
        Reporter(address, worker_id="stranger"),
    ):

        async def shown() -> list[memmgr_pb2.WorkerMemory]:
            return list((await cluster(address)).workers)

        async def shows_it() -> bool:
            return await shown() == [reporter.memory]

        async def shows_none() -> bool:
            return await shown() == []

        async def shows_its_group() -> bool:
            return [group.group_id for group in (await cluster(address)).groups] == ["group-w0"]

        assert await shown() == []
        async with registered(store, KEY, worker_record()):
            await eventually(shows_it)
            reporter.memory.kv_blocks_free = 7
            await eventually(shows_it)
            await eventually(shows_its_group)
        await eventually(shows_none)
        # Still reporting, but under an incarnation that is not the registered one.
        async with registered(store, KEY, worker_record(incarnation="w0-b")):
            await group_becomes(store, group_record(worker_record(incarnation="w0-b"), epoch=3))
            assert await shown() == []


@pytest.mark.parametrize(
    "fields",
    [{"budget_bytes": -1}, {"kv_blocks_free": 101}, {"incarnation": ""}, {"worker_id": ""}],
)
async def test_an_impossible_report_is_refused(store: Store, fields: dict[str, object]) -> None:
    async with memmgr(store) as address, Reporter(address, **fields) as reporter:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reporter.call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


class DemandStream:
    """A scheduler's stream of demand."""

    def __init__(self, address: str, *demands: memmgr_pb2.ModelDemand) -> None:
        self._address = address
        self.demands = demands

    async def __aenter__(self) -> "DemandStream":
        self._channel = open_channel(self._address)
        stub = memmgr_pb2_grpc.MemmgrServiceStub(self._channel)
        self.call = stub.ReportDemand(self._reports())
        return self

    async def __aexit__(self, *error: object) -> None:
        self.call.cancel()
        await self._channel.close(None)

    async def _reports(self) -> AsyncIterator[memmgr_pb2.ReportDemandRequest]:
        while True:
            yield memmgr_pb2.ReportDemandRequest(demands=self.demands)
            await asyncio.sleep(0.1)


async def test_reports_are_accepted_before_their_streams_end(store: Store) -> None:
    """Otherwise the sender's gRPC buffers its reports for a retry."""
    async with (
        memmgr(store) as address,
        Reporter(address) as memory,
        DemandStream(address) as demand,
        timeout(30),
    ):
        for call in (memory.call, demand.call):
            await call.initial_metadata()
            assert not call.done()


async def test_demand_beyond_the_capacity_leads_to_a_decision(store: Store) -> None:
    """Two full workers and a queue; the decision shows the reported numbers."""
    async with (
        memmgr(store) as address,
        registered(store, KEY, worker_record()),
        registered(store, f"{WORKERS}w1", worker_record("w1")),
        Reporter(address, kv_blocks_free=0),
        Reporter(address, worker_id="w1", incarnation="w1-a", kv_blocks_free=20),
        DemandStream(address, memmgr_pb2.ModelDemand(model="m", queued=3, queued_tokens=999)),
    ):

        async def decisions() -> list[memmgr_pb2.Decision]:
            return list((await cluster(address)).decisions)

        first = (await eventually(decisions))[0]
        assert (first.model, first.action) == ("m", memmgr_pb2.DECISION_ACTION_MERGE)
        assert first.cause == memmgr_pb2.DECISION_CAUSE_OVERLOAD
        assert (first.queued_tokens, first.waiting) == (999, 3)
        assert (first.used_tokens, first.capacity_tokens) == (180 * 16, 200 * 16)
        assert first.demand_tokens == 180 * 16 + 999
        assert first.needed_tokens == first.demand_tokens - first.capacity_tokens


async def test_impossible_demand_is_refused(store: Store) -> None:
    async with (
        memmgr(store) as address,
        DemandStream(address, memmgr_pb2.ModelDemand(model="m", queued=-1)) as stream,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_scheduler_reports_its_queue(store: Store) -> None:
    """A real scheduler, whose two workers have no room."""
    config = SchedulerConfig(etcd_url=store.url, lease_ttl_s=LEASE_TTL_S)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        address = await enter(memmgr(store, overload_dwell_s=0.0))
        await enter(serving(serve_scheduler, config))
        scheduler = await service_address(store, "scheduler")
        for worker_id in ("w0", "w1"):
            record = worker_record(worker_id)
            await enter(registered(store, f"{WORKERS}{worker_id}", record))
            memory = {"worker_id": worker_id, "incarnation": record.incarnation}
            await enter(Reporter(address, **memory, kv_blocks_free=0))
            worker = FakeWorker(record)
            worker.load.kv_blocks_free = 0
            await enter(worker.reporting(scheduler))
        gateway = await enter(FakeGateway.connected(scheduler))

        await eventually(lambda: gateway.heartbeats and gateway.heartbeats[-1].groups_serving == 2)
        for number in range(2):
            await gateway.ask(f"r{number}", prompt_tokens=90, max_tokens=500)

        async def reported() -> bool:
            decisions = (await cluster(address)).decisions
            # Each needs six blocks for its prompt and one for its output.
            return any(
                decision.queued_tokens == 2 * 7 * 16 and decision.waiting == 2
                for decision in decisions
            )

        await eventually(reported)


async def test_a_shortfall_is_reported_until_the_memory_manager_stops(store: Store) -> None:
    """A full worker and a queue: there is no group to merge with."""
    heard: list[ShortfallsReported] = []
    services = Directory(store, SERVICES, record_pb2.ServiceRecord)
    watch = ShortfallWatch(services, heard.append, lambda address, _: open_channel(address))
    async with asyncio.TaskGroup() as tasks:
        listening = [tasks.create_task(stream.run()) for stream in (services, watch)]
        async with (
            memmgr(store) as address,
            registered(store, KEY, worker_record()),
            Reporter(address, kv_blocks_free=0),
            DemandStream(address, memmgr_pb2.ModelDemand(model="m", queued=3, queued_tokens=960)),
        ):
            await eventually(lambda: heard)
            (shown,) = (await cluster(address)).shortfalls
            assert (shown.model, shown.tokens) == ("m", 960)
            assert heard[0].shortfalls == {"m": 960}
        await eventually(lambda: len(heard) > 1)
        for task in listening:
            task.cancel()
    assert heard[-1].shortfalls == {}
