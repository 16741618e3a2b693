"""Merges, splits and losses with a real etcd, a real memory manager and real member services."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
import yaml

from services.common.config import from_mapping
from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import ASSIGNMENTS, GROUPS, LEADERS, SERVICES
from services.common.records import decode_record
from services.memmgr.app import serve
from services.memmgr.config import MemmgrConfig
from tests.support.control_plane import (
    LEASE_TTL_S,
    SHORT_LEASE_TTL_S,
    group_record,
    put,
    service_address,
    serving,
)
from tests.support.member import FakeMember, all_serve, member, prepare_request, reporting
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.worker.v1 import worker_pb2

PREPARING = memmgr_pb2.RECONFIGURATION_PHASE_PREPARING
COMMITTED = memmgr_pb2.RECONFIGURATION_PHASE_COMMITTED
STABLE = memmgr_pb2.RECONFIGURATION_PHASE_STABLE
FAILED = memmgr_pb2.RECONFIGURATION_PHASE_FAILED
MERGE, SPLIT = memmgr_pb2.DECISION_ACTION_MERGE, memmgr_pb2.DECISION_ACTION_RESTORE
LEADER = f"{LEADERS}memmgr"


@asynccontextmanager
async def memmgr(store: Store, **changes: object) -> AsyncIterator[str]:
    """A running memory manager, which leads unless another does; yields its address."""
    options: dict[str, object] = {
        "etcd_url": store.url,
        "lease_ttl_s": LEASE_TTL_S,
        "backoff_s": 0.1,
    }
    async with serving(serve, from_mapping(MemmgrConfig, options | changes, "a test")):
        await eventually(lambda: store.list_prefix(LEADER))
        yield await service_address(store, "memmgr")


async def groups(store: Store) -> dict[str, record_pb2.GroupRecord]:
    listing = await store.list_prefix(GROUPS)
    records = {
        key.removeprefix(GROUPS): decode_record(record_pb2.GroupRecord, entry.value)
        for key, entry in listing.items()
    }
    return {key: record for key, record in records.items() if record is not None}


async def unmarked(store: Store) -> bool:
    """Whether no group is in an attempt."""
    return not any(record.attempt for record in (await groups(store)).values())


def layers(record: record_pb2.GroupRecord) -> list[tuple[str, int, int]]:
    return [(member.worker_id, member.first_layer, member.end_layer) for member in record.members]


@asynccontextmanager
async def pair(store: Store) -> AsyncIterator[tuple[str, FakeMember, FakeMember]]:
    """A memory manager's address, and two serving members that report to it."""
    async with (
        memmgr(store) as address,
        member(store, "w0") as first,
        member(store, "w1") as second,
        reporting(address, first, second),
    ):
        await all_serve(address, first, second)
        yield address, first, second


async def serves(member: FakeMember) -> None:
    await eventually(lambda: member.engine.serving is not None)


async def steps(call: object) -> list[memmgr_pb2.ReconfigurationStep]:
    return [answer.step async for answer in call]  # type: ignore[attr-defined]


@asynccontextmanager
async def stub(address: str) -> AsyncIterator[memmgr_pb2_grpc.MemmgrServiceStub]:
    async with open_channel(address) as channel:
        yield memmgr_pb2_grpc.MemmgrServiceStub(channel)


async def merge(address: str, *group_ids: str) -> list[memmgr_pb2.ReconfigurationStep]:
    async with stub(address) as calls:
        request = memmgr_pb2.MergeGroupsRequest(group_ids=group_ids)
        return await steps(calls.MergeGroups(request, timeout=DEADLINE_S))


async def split(address: str, group_id: str = "") -> list[memmgr_pb2.ReconfigurationStep]:
    async with stub(address) as calls:
        request = memmgr_pb2.SplitGroupRequest(group_id=group_id)
        return await steps(calls.SplitGroup(request, timeout=DEADLINE_S))


async def test_merge_and_split(store: Store) -> None:
    async with pair(store) as (address, first, second):
        merged = await merge(address, "group-w0", "group-w1")
        assert [step.phase for step in merged] == [PREPARING, COMMITTED, STABLE]
        records = await groups(store)
        assert layers(records["group-w0"]) == [("w0", 0, 2), ("w1", 2, 4)]
        assert records["group-w1"].phase == record_pb2.GROUP_PHASE_DISSOLVED
        assert {record.epoch for record in records.values()} == {merged[-1].epoch}
        assert (first.engine.held, second.engine.held) == ({0, 1}, {2, 3})
        mine, theirs = first.engine.preparations[-1], second.engine.preparations[-1]
        assert mine.target.epoch == merged[-1].epoch
        assert [peer.bulk_address for peer in mine.peers] == ["w0:9", "w1:9"]
        assert [peer.address for peer in mine.peers] == [
            first.record.address,
            second.record.address,
        ]
        assert mine.peers == theirs.peers
        nonces = [n for peer in mine.peers for n in (peer.activation_nonce, peer.bulk_nonce)]
        assert {len(nonce) for nonce in nonces} == {16} and len(set(nonces)) == 4
        assert mine.others == ()

        again = await split(address)
        assert again[-1].phase == STABLE, again[-1].message
        assert again[-1].epoch > merged[-1].epoch
        mine, theirs = first.engine.preparations[-1], second.engine.preparations[-1]
        assert (mine.others, theirs.others) == ((theirs.target,), (mine.target,))
        assert (first.engine.held, second.engine.held) == ({0, 1, 2, 3}, {0, 1, 2, 3})
        listing = await store.list_prefix(ASSIGNMENTS)
        assigned = [decode_record(record_pb2.AssignmentRecord, e.value) for e in listing.values()]
        assert {record.group_id for record in assigned if record} == {"group-w0", "group-w1"}


@asynccontextmanager
async def demand(address: str, queued_tokens: int) -> AsyncIterator[None]:
    """Report a queue as a scheduler during the body."""
    queue = memmgr_pb2.ModelDemand(model="m", queued=1, queued_tokens=queued_tokens)

    async def reports() -> AsyncIterator[memmgr_pb2.ReportDemandRequest]:
        while True:
            yield memmgr_pb2.ReportDemandRequest(demands=[queue])
            await asyncio.sleep(0.1)

    async with stub(address) as calls:
        call = calls.ReportDemand(reports())
        try:
            yield
        finally:
            call.cancel()


async def test_overload_merges_and_subsided_demand_splits(store: Store) -> None:
    async with (
        memmgr(store, overload_dwell_s=0.1, split_dwell_s=0.1) as address,
        member(store, "w0") as first,
        member(store, "w1") as second,
        reporting(address, first, second),
    ):
        await all_serve(address, first, second)
        engines = first.engine, second.engine
        for engine in engines:
            engine.blocks_total, engine.blocks_free = 100, 0
        async with demand(address, queued_tokens=999):
            await eventually(lambda: all(len(engine.held) == 2 for engine in engines))
            for engine in engines:
                engine.blocks_total, engine.blocks_free = 512, 500
        await eventually(lambda: all(len(engine.held) == 4 for engine in engines))
        async with stub(address) as calls:

            async def ended() -> bool:
                answer = await calls.GetCluster(memmgr_pb2.GetClusterRequest(), timeout=30)
                done = [
                    decision.action
                    for decision in answer.decisions
                    if "all members serve" in decision.outcome
                ]
                return MERGE in done and SPLIT in done[done.index(MERGE) :]

            await eventually(ended)


async def test_a_refusal_changes_nothing(store: Store) -> None:
    async with pair(store) as (address, first, second):
        before = await groups(store)
        second.engine.refuse = "no room for that"
        second.engine.go.clear()
        merging = asyncio.create_task(merge(address))
        await eventually(lambda: bool(first.engine.preparations))
        second.engine.go.set()
        (*_, last) = await merging
        assert last.phase == FAILED
        assert last.message == "w1 refused: no room for that"

        async def as_before() -> bool:
            return await groups(store) == before

        await eventually(as_before)
        await eventually(lambda: len(first.engine.aborted) == 1)
        assert first.engine.epoch == 1 and first.engine.held == {0, 1, 2, 3}
        second.engine.refuse = ""

        async def merges() -> bool:
            return (await merge(address))[-1].phase == STABLE

        await eventually(merges)


@pytest.mark.parametrize("refuse", ["", "no room for that"])
async def test_a_member_is_preparing_until_the_change_is_committed_or_aborted(
    store: Store, refuse: str
) -> None:
    async with pair(store) as (address, first, second):
        second.engine.refuse = refuse
        second.engine.go.clear()
        assert not first.servicer.preparing and not second.servicer.preparing
        merging = asyncio.create_task(merge(address))
        await eventually(lambda: first.servicer.preparing and second.servicer.preparing)
        second.engine.go.set()
        assert (await merging)[-1].phase == (FAILED if refuse else STABLE)
        await eventually(lambda: not first.servicer.preparing and not second.servicer.preparing)


async def test_a_leaving_worker_refuses_every_preparation(store: Store) -> None:
    async with pair(store) as (address, first, second):
        second.servicer.refuse_all()
        last = (await merge(address))[-1]
        refusal = "w1 refused: the worker is stopping; leave it out"
        assert (last.phase, last.message) == (FAILED, refusal)
        assert second.engine.preparations == [] and not second.servicer.preparing
        await eventually(lambda: not first.servicer.preparing)


async def test_a_group_is_degraded_until_its_survivor_has_all_layers(
    store: Store,
) -> None:
    async with memmgr(store) as address, member(store, "w0") as first:
        async with member(store, "w1") as second, reporting(address, first, second):
            await all_serve(address, first, second)
            first.engine.go.clear()
            assert (await _merged_slowly(address, first))[-1].phase == STABLE
            first.engine.go.clear()

        async def degraded() -> bool:
            record = (await groups(store))["group-w0"]
            return record.phase == record_pb2.GROUP_PHASE_DEGRADED and bool(record.attempt)

        await eventually(degraded)
        async with stub(address) as calls:
            cluster = await calls.GetCluster(memmgr_pb2.GetClusterRequest(), timeout=30)
        losses = {loss.group_id: loss.reason for loss in cluster.losses}
        assert losses["group-w0"] == "w1 is gone"
        await eventually(lambda: len(first.engine.preparations) >= 2)
        assert first.engine.held == {0, 1}
        first.engine.go.set()
        await eventually(lambda: first.engine.held == {0, 1, 2, 3})
        assert (await groups(store))["group-w0"].phase == record_pb2.GROUP_PHASE_STABLE


async def _merged_slowly(address: str, first: FakeMember) -> list[memmgr_pb2.ReconfigurationStep]:
    """Merge while `first` is slow to prepare; it must keep serving."""
    merging = asyncio.create_task(merge(address))
    await eventually(lambda: bool(first.engine.preparations))
    assert first.engine.epoch == 1
    first.engine.go.set()
    return await merging


async def test_a_silent_member_aborts_the_change_at_the_deadline(store: Store) -> None:
    async with (
        memmgr(store, prepare_timeout_s=3.0) as address,
        member(store, "w0") as first,
        member(store, "w1") as second,
    ):
        await all_serve(address, first, second)
        second.engine.go.clear()
        assert (await merge(address))[-1].phase == FAILED
        await eventually(lambda: len(first.engine.aborted) == len(second.engine.aborted) == 1)


async def test_a_restarted_memory_manager_aborts_its_predecessors_attempt(store: Store) -> None:
    async with member(store, "w0") as first, member(store, "w1") as second:
        async with memmgr(store) as address:
            await all_serve(address, first, second)
            second.engine.go.clear()
            merging = asyncio.create_task(merge(address))
            engines = first.engine, second.engine
            await eventually(lambda: all(engine.preparations for engine in engines))
        (*_, last) = await merging
        assert (last.phase, "leadership" in last.message) == (FAILED, True)
        assert all(record.attempt for record in (await groups(store)).values())
        async with memmgr(store):
            await eventually(lambda: unmarked(store))
            await eventually(lambda: len(first.engine.aborted) == len(second.engine.aborted) == 1)


@pytest.mark.parametrize(
    ("group_ids", "reason"),
    [
        (["group-w0", "group-x"], "no group 'group-x'"),
        (["group-w0", "group-w0"], "named twice"),
        (["group-w0"], "a merge needs two"),
    ],
)
async def test_an_impossible_merge_is_refused_in_one_sentence(
    store: Store, group_ids: list[str], reason: str
) -> None:
    async with (
        memmgr(store) as address,
        member(store, "w0") as first,
        member(store, "w1") as second,
    ):
        await all_serve(address, first, second)
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
            await merge(address, *group_ids)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="nothing to restore"):
            await split(address)


async def _standby(store: Store) -> str:
    """The address of the standby instance."""

    async def find() -> str:
        leader = decode_record(
            record_pb2.ServiceRecord, (await store.list_prefix(LEADER))[LEADER].value
        )
        listing = await store.list_prefix(f"{SERVICES}memmgr/")
        records = [decode_record(record_pb2.ServiceRecord, e.value) for e in listing.values()]
        return next((record.address for record in records if record and record != leader), "")

    return await eventually(find)


class TestTwoMemoryManagers:
    async def test_a_standby_serves_reads_only(self, store: Store) -> None:
        async with memmgr(store) as first, memmgr(store), member(store, "w0") as worker:
            await serves(worker)
            standby = await _standby(store)
            assert standby != first

            async def leader_is_newest() -> bool:
                return await service_address(store, "memmgr") == first

            await eventually(leader_is_newest)
            async with stub(standby) as calls:

                async def listed() -> bool:
                    answer = await calls.ListGroups(memmgr_pb2.ListGroupsRequest(), timeout=30)
                    return [group.group_id for group in answer.groups] == ["group-w0"]

                await eventually(listed)
            async with member(store, "w1") as second:
                await serves(second)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await merge(standby)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    async def test_a_former_leader_has_no_effect_once_another_leads(
        self, store: Store, tmp_path: Path
    ) -> None:
        """It is suspended during an attempt for longer than its lease, then continues."""
        path = tmp_path / "memmgr.yaml"
        path.write_text(yaml.safe_dump({"etcd_url": store.url, "lease_ttl_s": SHORT_LEASE_TTL_S}))
        frozen = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.memmgr", "--config", str(path))
        )
        try:
            async with member(store, "w0") as first, member(store, "w1") as second:
                await serves(first)
                old_token = (await store.list_prefix(LEADER))[LEADER].create_revision
                old_address = await service_address(store, "memmgr")
                await all_serve(old_address, first, second)
                second.engine.go.clear()
                merging = asyncio.create_task(merge(old_address))
                await eventually(lambda: bool(second.engine.preparations))
                frozen.send_signal(signal.SIGSTOP)
                # Its member becomes ready, so that only the commit remains.
                second.engine.go.set()
                async with memmgr(store):

                    async def taken_over() -> bool:
                        entry = (await store.list_prefix(LEADER)).get(LEADER)
                        return entry is not None and entry.create_revision > old_token

                    await eventually(taken_over)
                    await eventually(lambda: len(second.engine.aborted) == 1)
                    await eventually(lambda: unmarked(store))
                    before = await store.list_prefix(GROUPS)
                    frozen.send_signal(signal.SIGCONT)
                    # It notices that its lease has expired, and informs its callers.
                    (*_, last) = await merging
                    assert last.phase == FAILED
                    assert await store.list_prefix(GROUPS) == before
                    assert first.engine.epoch == second.engine.epoch == 1
                    async with member(store, "w2") as three:
                        await serves(three)
        finally:
            frozen.kill()
            await frozen.wait()


async def marked(
    store: Store, participant: FakeMember, attempt: str = "7-1"
) -> worker_pb2.PrepareRequest:
    """A prepare request to w0, whose group record is marked with the attempt."""
    key = f"{GROUPS}group-w0"
    record = group_record(participant.record, 1)
    record.attempt = attempt
    await put(store, key, record)
    await serves(participant)
    entry = await store.read(key)
    assert entry is not None
    target = group_record(participant.record, 9)
    return prepare_request(target, attempt=attempt, mod_revision=entry.mod_revision)


class TestMember:
    """Calls that a member refuses."""

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"incarnation": "w0-z"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"epoch": 0}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"group_id": "group-w9"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"epoch": 5}, grpc.StatusCode.ABORTED),
            ({"mod_revision": 1}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"mod_revision": 10**9}, grpc.StatusCode.ABORTED),  # a mark that is not in etcd
            ({"attempt": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ],
    )
    async def test_stale_or_foreign_calls_are_refused(
        self,
        store: Store,
        changes: dict[str, object],
        code: grpc.StatusCode,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("services.worker.member.servicer.FUTURE_WAIT_S", 0.2)
        async with member(store, "w0") as fake, open_channel(fake.record.address) as channel:
            request = await marked(store, fake)
            for name, value in changes.items():
                setattr(request, name, value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fake.stub(channel).Prepare(request, timeout=30)
            assert caught.value.code() is code
            assert fake.engine.preparations == []

    async def test_lower_tokens_are_refused_and_repetitions_get_the_same_answer(
        self, store: Store
    ) -> None:
        async with (
            member(store, "w0") as fake,
            open_channel(fake.record.address) as channel,
        ):
            request = await marked(store, fake)
            first = await fake.stub(channel).Prepare(request, timeout=30)
            assert first == await fake.stub(channel).Prepare(request, timeout=30)
            assert len(fake.engine.preparations) == 1
            stale = prepare_request(request.target, token=6, attempt="6-1")
            with pytest.raises(grpc.aio.AioRpcError, match="newer coordinator"):
                await fake.stub(channel).Prepare(stale, timeout=30)

    async def test_a_later_attempt_replaces_an_earlier_one(self, store: Store) -> None:
        async with (
            member(store, "w0") as fake,
            open_channel(fake.record.address) as channel,
        ):
            request = await marked(store, fake)
            fake.engine.go.clear()
            first = fake.stub(channel).Prepare(request, timeout=30)
            await eventually(lambda: bool(fake.engine.preparations))
            later = await marked(store, fake, attempt="7-2")
            second = fake.stub(channel).Prepare(later, timeout=30)
            await eventually(lambda: fake.engine.aborted == ["7-1"])
            with pytest.raises(grpc.aio.AioRpcError, match="the attempt was aborted"):
                await first
            fake.engine.go.set()
            assert (await second).attempt == "7-2"
