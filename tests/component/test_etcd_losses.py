"""Deleted keys, and an etcd that restarts without its latest writes or empty."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from services.common.config import from_mapping
from services.common.election import Election, leader_key
from services.common.errors import StoreError
from services.common.etcd import Store, StoreSnapshot
from services.common.grpc_client import open_channel
from services.common.membership import QUOTAS, WORKERS, Directory
from services.common.records import encode_record
from services.core.quota.state import QuotaState
from services.gateway.keys.quota_exchange import QuotaExchange
from services.memmgr.app import serve
from services.memmgr.config import MemmgrConfig
from tests.support.control_plane import (
    LEASE_TTL_S,
    delete,
    group_record,
    open_store,
    put,
    read_group,
    registered,
    service_address,
    serving,
    worker_record,
)
from tests.support.etcd_server import EtcdServer, running_etcd
from tests.support.member import FakeMember, all_serve, member, prepare_request, reporting
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.worker.v1 import worker_pb2

KEY = f"{WORKERS}w0"
LEADER = leader_key("memmgr")


@asynccontextmanager
async def two_members(store: Store) -> AsyncIterator[tuple[FakeMember, FakeMember]]:
    """A memory manager and two members."""
    options = {"etcd_url": store.url, "lease_ttl_s": LEASE_TTL_S, "backoff_s": 0.1}
    async with (
        serving(serve, from_mapping(MemmgrConfig, options, "a test")),
        member(store, "w0") as first,
        member(store, "w1") as second,
    ):
        yield first, second


async def value_at(store: Store, key: str) -> bytes | None:
    entry = await store.read(key)
    return entry.value if entry is not None else None


def away_and_back(etcd: EtcdServer, data: Path | None) -> None:
    """Restart etcd with a copy's data, or empty."""
    etcd.kill()
    etcd.replace_data(data)
    etcd.start()


def copied(etcd: EtcdServer, folder: Path) -> Path:
    """A copy of etcd's data."""
    etcd.stop()
    etcd.copy_data(folder / "copy")
    etcd.start()
    return folder / "copy"


class TestKeys:
    """Leases here outlast the test: keys are restored before they expire."""

    async def test_a_deleted_key_is_registered_again(self, store: Store) -> None:
        async with registered(store, KEY, worker_record()) as registration:
            lease = registration._lease
            await delete(store, KEY)
            await eventually(lambda: value_at(store, KEY))
            await eventually(registration.registered.is_set)
            entry = await store.read(KEY)
            assert entry is not None and entry.lease == registration._lease != lease
        assert await value_at(store, KEY) is None

    async def test_a_key_without_its_lease_is_moved_to_a_lease(self, store: Store) -> None:
        """As when an operator writes a key back from a listing."""
        async with registered(store, KEY, worker_record()):
            await put(store, KEY, worker_record())

            async def leased() -> bool:
                entry = await store.read(KEY)
                return entry is not None and entry.lease != 0

            await eventually(leased)
        assert await value_at(store, KEY) is None

    async def test_registration_waits_for_the_key_of_another_process(self, store: Store) -> None:
        theirs = worker_record(incarnation="b")
        async with registered(store, KEY, worker_record()) as registration:
            await put(store, KEY, theirs)
            await eventually(registration.lost.is_set)
            assert await value_at(store, KEY) == encode_record(theirs)
            await delete(store, KEY)
            await eventually(registration.registered.is_set)
            assert await value_at(store, KEY) == encode_record(worker_record())

    async def test_an_update_is_not_a_loss(self, store: Store) -> None:
        async with registered(store, KEY, worker_record()) as registration:
            before = await store.read(KEY)
            for draining in (True, False, True):
                await registration.update(worker_record(draining=draining))
            after = await store.read(KEY)
            assert before is not None and after is not None
            assert after.create_revision == before.create_revision

    async def test_a_deleted_quota_report_is_published_again(self, store: Store) -> None:
        """Also a report without demand, as other gateways count the reports."""
        key = f"{QUOTAS}a"
        exchange = QuotaExchange(store, "a", QuotaState(), LEASE_TTL_S)
        task = asyncio.create_task(exchange.run())
        await eventually(lambda: value_at(store, key))
        await delete(store, key)
        await eventually(lambda: value_at(store, key))
        task.cancel()
        await asyncio.wait([task])
        await exchange.withdraw()
        assert await value_at(store, key) is None


class TestElection:
    async def test_a_leader_with_a_deleted_key_gets_a_new_token(self, store: Store) -> None:
        async with candidate(store, "a") as (election, tokens):
            await eventually(lambda: election.token)
            first = election.token
            await delete(store, LEADER)
            await eventually(lambda: election.token > first)
            assert tokens == [first, 0, election.token]

    async def test_a_leader_steps_down_for_another_leader(self, store: Store) -> None:
        async with candidate(store, "a") as (first, _):
            await eventually(lambda: first.token)
            await put(store, LEADER, record_pb2.ServiceRecord(name="memmgr", incarnation="b"))
            await eventually(lambda: not first.token)
            await delete(store, LEADER)
            await eventually(lambda: first.token)


@asynccontextmanager
async def candidate(store: Store, name: str) -> AsyncIterator[tuple[Election, list[int]]]:
    tokens: list[int] = []
    record = record_pb2.ServiceRecord(name="memmgr", incarnation=name)
    election = Election(store, "memmgr", record, LEASE_TTL_S, tokens.append)
    task = asyncio.create_task(election.run())
    try:
        yield election, tokens
    finally:
        task.cancel()
        await asyncio.wait([task])
        await election.resign()


class TestRollback:
    async def test_a_snapshot_has_the_number_of_rollbacks(
        self, store: Store, etcd: EtcdServer, tmp_path: Path
    ) -> None:
        await put(store, KEY, worker_record())
        data = copied(etcd, tmp_path)
        async with open_store(etcd.url) as reader:
            for _ in range(3):
                await put(reader, KEY, worker_record())
            assert (await reader.snapshot("")).rollbacks == 0
            etcd.kill()
            etcd.start()
            assert (await until_read(reader)).rollbacks == 0, "a restart loses nothing"
            away_and_back(etcd, data)
            after = await until_read(reader)
            assert (after.rollbacks, reader.calls.rollbacks) == (1, 1)
            assert after.entries.keys() == {KEY}
            await put(reader, KEY, worker_record())
            assert (await reader.snapshot("")).rollbacks == 1
            away_and_back(etcd, None)
            after = await until_read(reader)
            assert (after.rollbacks, after.entries) == (2, {})

    async def test_a_directory_reports_lost_writes_even_with_equal_records(
        self, store: Store, etcd: EtcdServer, tmp_path: Path
    ) -> None:
        await put(store, KEY, worker_record())
        data = copied(etcd, tmp_path)
        seen: list[int] = []
        directory: Directory[record_pb2.WorkerRecord] = Directory(
            store, WORKERS, record_pb2.WorkerRecord, lambda: seen.append(directory.rollbacks)
        )
        task = asyncio.create_task(directory.run())
        await eventually(lambda: seen == [0])
        for number in range(3):
            await store.put(f"elsewhere/{number}", b"")
        away_and_back(etcd, data)
        await eventually(lambda: seen == [0, 1])
        assert directory.records == {KEY: worker_record()}
        task.cancel()
        await asyncio.wait([task])

    async def test_all_registrations_are_repeated_in_an_empty_etcd(
        self, store: Store, etcd: EtcdServer
    ) -> None:
        async with registered(store, KEY, worker_record()), candidate(store, "a") as (first, _):
            await eventually(lambda: first.token)
            away_and_back(etcd, None)
            await until_read(store)
            await eventually(lambda: value_at(store, KEY))
            await eventually(lambda: value_at(store, LEADER))

    @pytest.mark.parametrize("data", ["old", "empty", "overtaken"])
    async def test_groups_change_again(
        self, store: Store, etcd: EtcdServer, tmp_path: Path, data: str
    ) -> None:
        """A merged group whose record is lost: its members keep their layers until a new epoch.

        A restored etcd may exceed the lost revisions, as with `--bump-revision`.
        """
        async with two_members(store) as (first, second):
            before = await service_address(store, "memmgr")
            async with reporting(before, first, second):
                await all_serve(before, first, second)
                copy = copied(etcd, tmp_path)
                await all_serve(before, first, second)
                epoch = await merged(before)
            assert (first.engine.held, second.engine.held) == ({0, 1}, {2, 3})
            if data == "overtaken":
                copy = await overtaken(copy, tmp_path)
            away_and_back(etcd, None if data == "empty" else copy)
            await eventually(lambda: is_whole(first, epoch) and is_whole(second, epoch))
            await until_read(store)
            address = await other_address(store, before)
            async with reporting(address, first, second):
                await all_serve(address, first, second)
                assert await merged(address) > epoch

    async def test_calls_of_a_lost_history_have_no_effect(
        self, store: Store, etcd: EtcdServer, tmp_path: Path
    ) -> None:
        """They come from a memory manager that has not noticed that etcd has lost writes."""
        async with two_members(store) as (first, second):
            before = await service_address(store, "memmgr")
            async with reporting(before, first, second):
                await all_serve(before, first, second)
            copy = copied(etcd, tmp_path)
            await until_read(store)
            # More writes than occur before the memory manager reads etcd again. It must have read
            # them: a rollback of writes that it does not know does not restart it.
            for number in range(300):
                await store.put(f"elsewhere/{number}", b"")
            await put(store, f"{WORKERS}w2", worker_record("w2"))
            await eventually(lambda: read_group(store, "w2"))
            away_and_back(etcd, copy)
            await eventually(lambda: first.directory.rollbacks == 1)
            late = prepare_request(group_record(first.record, 9), token=10**6)
            late.epoch = first.engine.epoch
            async with open_channel(first.record.address) as channel:
                await first.stub(channel).Abort(
                    worker_pb2.AbortRequest(
                        token=late.token, attempt=late.attempt, incarnation=late.incarnation
                    )
                )
                with pytest.raises(grpc.aio.AioRpcError):
                    await first.stub(channel).Prepare(late, timeout=1)
            address = await other_address(store, before)
            async with reporting(address, first, second):
                await all_serve(address, first, second)
                await merged(address)


def is_whole(worker: FakeMember, epoch: int) -> bool:
    """Whether the member serves in a group of its own, in a later configuration."""
    group = worker.engine.serving
    assert group is not None
    return group.epoch > epoch and group.phase == "stable" and len(worker.engine.held) == 4


async def until_read(store: Store) -> StoreSnapshot:
    """Wait for a snapshot of a restarted etcd."""
    while True:
        try:
            return await store.snapshot("")
        except StoreError:
            await asyncio.sleep(0.1)


async def overtaken(data: Path, folder: Path) -> Path:
    """A copy of etcd's data with many additional writes."""
    with running_etcd() as server:
        server.kill()
        server.replace_data(data)
        server.start()
        async with open_store(server.url) as store:
            for number in range(100):
                await store.put(f"elsewhere/{number}", b"")
        server.stop()
        server.copy_data(folder / "overtaken")
    return folder / "overtaken"


async def other_address(store: Store, before: str) -> str:
    """The address of a restarted memory manager."""

    async def later() -> str:
        address = await service_address(store, "memmgr")
        return address if address != before else ""

    return await eventually(later)


async def merged(address: str) -> int:
    """Merge all groups; returns the epoch."""
    async with open_channel(address) as channel:
        stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
        call = stub.MergeGroups(memmgr_pb2.MergeGroupsRequest(), timeout=DEADLINE_S)
        steps = [answer.step async for answer in call]
    assert steps[-1].phase == memmgr_pb2.RECONFIGURATION_PHASE_STABLE, steps[-1].message
    return steps[-1].epoch
