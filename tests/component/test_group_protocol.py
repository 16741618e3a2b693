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
    """A running memory manager, which leads if no other does; yields its address."""
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
    return [(one.worker_id, one.first_layer, one.end_layer) for one in record.members]


@asynccontextmanager
async def pair(store: Store) -> AsyncIterator[tuple[str, FakeMember, FakeMember]]:
    """A memory manager's address, and two members that report to it and serve."""
    async with (
        memmgr(store) as address,
        member(store, "w0") as one,
        member(store, "w1") as two,
        reporting(address, one, two),
    ):
        await all_serve(address, one, two)
        yield address, one, two


async def serves(one: FakeMember) -> None:
    await eventually(lambda: one.engine.serving is not None)


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
    async with pair(store) as (address, one, two):
        merged = await merge(address, "group-w0", "group-w1")
        assert [step.phase for step in merged] == [PREPARING, COMMITTED, STABLE]
        records = await groups(store)
        assert layers(records["group-w0"]) == [("w0", 0, 2), ("w1", 2, 4)]
        assert records["group-w1"].phase == record_pb2.GROUP_PHASE_DISSOLVED
        assert {record.epoch for record in records.values()} == {merged[-1].epoch}
        assert (one.engine.held, two.engine.held) == ({0, 1}, {2, 3})
        mine, theirs = one.engine.preparations[-1], two.engine.preparations[-1]
        assert mine.target.epoch == merged[-1].epoch
        assert [peer.bulk_address for peer in mine.peers] == ["w0:9", "w1:9"]
        assert [peer.address for peer in mine.peers] == [one.record.address, two.record.address]
        assert mine.peers == theirs.peers
        nonces = [n for peer in mine.peers for n in (peer.activation_nonce, peer.bulk_nonce)]
        assert {len(nonce) for nonce in nonces} == {16} and len(set(nonces)) == 4
        assert mine.others == ()

        again = await split(address)
        assert again[-1].phase == STABLE, again[-1].message
        assert again[-1].epoch > merged[-1].epoch
        mine, theirs = one.engine.preparations[-1], two.engine.preparations[-1]
        assert (mine.others, theirs.others) == ((theirs.target,), (mine.target,))
        assert (one.engine.held, two.engine.held) == ({0, 1, 2, 3}, {0, 1, 2, 3})
        listing = await store.list_prefix(ASSIGNMENTS)
        assigned = [decode_record(record_pb2.AssignmentRecord, e.value) for e in listing.values()]
        assert {record.group_id for record in assigned if record} == {"group-w0", "group-w1"}


@asynccontextmanager
async def demand(address: str, queued_tokens: int) -> AsyncIterator[None]:
    """A scheduler reports a queue during the body."""
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
        member(store, "w0") as one,
        member(store, "w1") as two,
        reporting(address, one, two),
    ):
        await all_serve(address, one, two)
        engines = one.engine, two.engine
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
                    one.action for one in answer.decisions if "all members serve" in one.outcome
                ]
                return MERGE in done and SPLIT in done[done.index(MERGE) :]

            await eventually(ended)


async def test_a_refusal_leaves_everything_as_it_was(store: Store) -> None:
    async with pair(store) as (address, one, two):
        before = await groups(store)
        two.engine.refuse = "no room for that"
        two.engine.go.clear()
        merging = asyncio.create_task(merge(address))
        await eventually(lambda: bool(one.engine.preparations))
        two.engine.go.set()
        (*_, last) = await merging
        assert last.phase == FAILED
        assert last.message == "w1 refused: no room for that"

        async def as_before() -> bool:
            return await groups(store) == before

        await eventually(as_before)
        await eventually(lambda: len(one.engine.aborted) == 1)
        assert one.engine.epoch == 1 and one.engine.held == {0, 1, 2, 3}
        two.engine.refuse = ""

        async def merges() -> bool:
            return (await merge(address))[-1].phase == STABLE

        await eventually(merges)


@pytest.mark.parametrize("refuse", ["", "no room for that"])
async def test_it_counts_as_preparing_until_the_change_is_committed_or_aborted(
    store: Store, refuse: str
) -> None:
    async with pair(store) as (address, one, two):
        two.engine.refuse = refuse
        two.engine.go.clear()
        assert not one.servicer.preparing and not two.servicer.preparing
        merging = asyncio.create_task(merge(address))
        await eventually(lambda: one.servicer.preparing and two.servicer.preparing)
        two.engine.go.set()
        assert (await merging)[-1].phase == (FAILED if refuse else STABLE)
        await eventually(lambda: not one.servicer.preparing and not two.servicer.preparing)


async def test_a_leaving_worker_refuses_every_preparation(store: Store) -> None:
    async with pair(store) as (address, one, two):
        two.servicer.refuse_all()
        last = (await merge(address))[-1]
        refusal = "w1 refused: the worker is stopping; leave it out"
        assert (last.phase, last.message) == (FAILED, refusal)
        assert two.engine.preparations == [] and not two.servicer.preparing
        await eventually(lambda: not one.servicer.preparing)


async def test_a_lost_member_degrades_its_group_until_the_survivor_has_all_layers(
    store: Store,
) -> None:
    async with memmgr(store) as address, member(store, "w0") as one:
        async with member(store, "w1") as two, reporting(address, one, two):
            await all_serve(address, one, two)
            one.engine.go.clear()
            assert (await _merged_slowly(address, one))[-1].phase == STABLE
            one.engine.go.clear()

        async def degraded() -> bool:
            record = (await groups(store))["group-w0"]
            return record.phase == record_pb2.GROUP_PHASE_DEGRADED and bool(record.attempt)

        await eventually(degraded)
        async with stub(address) as calls:
            told = await calls.GetCluster(memmgr_pb2.GetClusterRequest(), timeout=30)
        losses = {loss.group_id: loss.reason for loss in told.losses}
        assert losses["group-w0"] == "w1 is gone"
        await eventually(lambda: len(one.engine.preparations) >= 2)
        assert one.engine.held == {0, 1}
        one.engine.go.set()
        await eventually(lambda: one.engine.held == {0, 1, 2, 3})
        assert (await groups(store))["group-w0"].phase == record_pb2.GROUP_PHASE_STABLE


async def _merged_slowly(address: str, one: FakeMember) -> list[memmgr_pb2.ReconfigurationStep]:
    """While `one` prepares, it serves as before."""
    merging = asyncio.create_task(merge(address))
    await eventually(lambda: bool(one.engine.preparations))
    assert one.engine.epoch == 1
    one.engine.go.set()
    return await merging


async def test_a_silent_member_is_waited_for_no_longer_than_allowed(store: Store) -> None:
    async with (
        memmgr(store, prepare_timeout_s=3.0) as address,
        member(store, "w0") as one,
        member(store, "w1") as two,
    ):
        await all_serve(address, one, two)
        two.engine.go.clear()
        assert (await merge(address))[-1].phase == FAILED
        await eventually(lambda: len(one.engine.aborted) == len(two.engine.aborted) == 1)


async def test_a_restarted_memory_manager_ends_its_predecessors_attempt(store: Store) -> None:
    async with member(store, "w0") as one, member(store, "w1") as two:
        async with memmgr(store) as address:
            await all_serve(address, one, two)
            two.engine.go.clear()
            merging = asyncio.create_task(merge(address))
            engines = one.engine, two.engine
            await eventually(lambda: all(engine.preparations for engine in engines))
        (*_, last) = await merging
        assert (last.phase, "leadership" in last.message) == (FAILED, True)
        assert all(record.attempt for record in (await groups(store)).values())
        async with memmgr(store):
            await eventually(lambda: unmarked(store))
            await eventually(lambda: len(one.engine.aborted) == len(two.engine.aborted) == 1)


@pytest.mark.parametrize(
    ("group_ids", "reason"),
    [
        (["group-w0", "group-x"], "no group 'group-x'"),
        (["group-w0", "group-w0"], "named twice"),
        (["group-w0"], "a merge needs two"),
    ],
)
async def test_a_merge_that_cannot_be_is_one_sentence(
    store: Store, group_ids: list[str], reason: str
) -> None:
    async with (
        memmgr(store) as address,
        member(store, "w0") as one,
        member(store, "w1") as two,
    ):
        await all_serve(address, one, two)
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
            await merge(address, *group_ids)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError, match="nothing to restore"):
            await split(address)


async def _standby(store: Store) -> str:
    """The address of the instance that does not lead."""

    async def find() -> str:
        leader = decode_record(
            record_pb2.ServiceRecord, (await store.list_prefix(LEADER))[LEADER].value
        )
        listing = await store.list_prefix(f"{SERVICES}memmgr/")
        records = [decode_record(record_pb2.ServiceRecord, e.value) for e in listing.values()]
        return next((one.address for one in records if one and one != leader), "")

    return await eventually(find)


class TestTwoMemoryManagers:
    async def test_a_standby_answers_reads_and_decides_nothing(self, store: Store) -> None:
        async with memmgr(store) as first, memmgr(store), member(store, "w0") as one:
            await serves(one)
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
            async with member(store, "w1") as two:
                await serves(two)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await merge(standby)
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION

    async def test_a_frozen_leader_has_no_effect_once_another_leads(
        self, store: Store, tmp_path: Path
    ) -> None:
        """It is stopped in the middle of an attempt for longer than its lease, then goes on."""
        path = tmp_path / "memmgr.yaml"
        path.write_text(yaml.safe_dump({"etcd_url": store.url, "lease_ttl_s": SHORT_LEASE_TTL_S}))
        frozen = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.memmgr", "--config", str(path))
        )
        try:
            async with member(store, "w0") as one, member(store, "w1") as two:
                await serves(one)
                old_token = (await store.list_prefix(LEADER))[LEADER].create_revision
                old_address = await service_address(store, "memmgr")
                await all_serve(old_address, one, two)
                two.engine.go.clear()
                merging = asyncio.create_task(merge(old_address))
                await eventually(lambda: bool(two.engine.preparations))
                frozen.send_signal(signal.SIGSTOP)
                # Its member becomes ready: all that the leader has to do is commit.
                two.engine.go.set()
                async with memmgr(store):

                    async def taken_over() -> bool:
                        entry = (await store.list_prefix(LEADER)).get(LEADER)
                        return entry is not None and entry.create_revision > old_token

                    await eventually(taken_over)
                    await eventually(lambda: len(two.engine.aborted) == 1)
                    await eventually(lambda: unmarked(store))
                    before = await store.list_prefix(GROUPS)
                    frozen.send_signal(signal.SIGCONT)
                    # It notices that its lease is over, and tells its callers.
                    (*_, last) = await merging
                    assert last.phase == FAILED
                    assert await store.list_prefix(GROUPS) == before
                    assert one.engine.epoch == two.engine.epoch == 1
                    async with member(store, "w2") as three:
                        await serves(three)
        finally:
            frozen.kill()
            await frozen.wait()


async def marked(
    store: Store, participant: FakeMember, attempt: str = "7-1"
) -> worker_pb2.PrepareRequest:
    """A request to w0, whose group has the mark of its attempt."""
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
    """What a member refuses to every caller."""

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"incarnation": "w0-z"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"epoch": 0}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"group_id": "group-w9"}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"epoch": 5}, grpc.StatusCode.ABORTED),
            ({"mod_revision": 1}, grpc.StatusCode.FAILED_PRECONDITION),
            ({"mod_revision": 10**9}, grpc.StatusCode.ABORTED),  # a mark that etcd does not have
            ({"attempt": ""}, grpc.StatusCode.INVALID_ARGUMENT),
        ],
    )
    async def test_what_is_stale_or_foreign_is_refused(
        self,
        store: Store,
        changes: dict[str, object],
        code: grpc.StatusCode,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("services.worker.member.servicer.FUTURE_WAIT_S", 0.2)
        async with member(store, "w0") as one, open_channel(one.record.address) as channel:
            request = await marked(store, one)
            for name, value in changes.items():
                setattr(request, name, value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.stub(channel).Prepare(request, timeout=30)
            assert caught.value.code() is code
            assert one.engine.preparations == []

    async def test_a_lower_token_is_refused_and_a_repetition_gets_the_same_answer(
        self, store: Store
    ) -> None:
        async with member(store, "w0") as one, open_channel(one.record.address) as channel:
            request = await marked(store, one)
            first = await one.stub(channel).Prepare(request, timeout=30)
            assert first == await one.stub(channel).Prepare(request, timeout=30)
            assert len(one.engine.preparations) == 1
            stale = prepare_request(request.target, token=6, attempt="6-1")
            with pytest.raises(grpc.aio.AioRpcError, match="newer coordinator"):
                await one.stub(channel).Prepare(stale, timeout=30)

    async def test_a_later_attempt_replaces_an_earlier_one(self, store: Store) -> None:
        async with member(store, "w0") as one, open_channel(one.record.address) as channel:
            request = await marked(store, one)
            one.engine.go.clear()
            first = one.stub(channel).Prepare(request, timeout=30)
            await eventually(lambda: bool(one.engine.preparations))
            later = await marked(store, one, attempt="7-2")
            second = one.stub(channel).Prepare(later, timeout=30)
            await eventually(lambda: one.engine.aborted == ["7-1"])
            with pytest.raises(grpc.aio.AioRpcError, match="the attempt was aborted"):
                await first
            one.engine.go.set()
            assert (await second).attempt == "7-2"
