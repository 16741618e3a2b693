"""Orders to move requests, with real etcd, memory manager and members, and fake engines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.records import CAN_DROP, GENERATE, HAND_OVER
from services.memmgr.app import serve
from services.memmgr.config import MemmgrConfig
from tests.support.control_plane import LEASE_TTL_S, service_address, serving
from tests.support.member import FakeMember, all_serve, member, reporting
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.worker.v1 import worker_pb2

ALIKE = {"model_digest": "weights", "protocol_version": 5, "code_digest": "code"}


@asynccontextmanager
async def cluster(
    store: Store, *records: dict[str, Any], **options: Any
) -> AsyncIterator[tuple[str, list[FakeMember]]]:
    """A memory manager's address, and a single-worker group for each of `records`."""
    config = MemmgrConfig(etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, **options)
    async with serving(serve, config), AsyncExitStack() as stack:
        members = [
            await stack.enter_async_context(member(store, f"w{number}", **(ALIKE | record)))
            for number, record in enumerate(records)
        ]
        address = await service_address(store, "memmgr")
        await stack.enter_async_context(reporting(address, *members))
        await all_serve(address, *members)
        yield address, members


async def move(
    address: str, source: str, target: str = "", requests: int = 0
) -> memmgr_pb2.MoveRequestsResponse:
    request = memmgr_pb2.MoveRequestsRequest(
        source_worker_id=source, target_worker_id=target, requests_max=requests
    )
    async with open_channel(address) as channel:
        stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
        return await stub.MoveRequests(request, timeout=DEADLINE_S)


async def test_both_workers_are_introduced_and_the_source_gets_the_order(store: Store) -> None:
    async with cluster(store, {}, {}, {}) as (address, members):
        first, second, third = (member.engine for member in members)
        first.running, second.blocks_free, third.blocks_free = 5, 3, 9
        second.blocks_total = third.blocks_total = 10

        async def sees_room() -> bool:
            return (await move(address, "w0", requests=1)).target_worker_id == "w2"

        await eventually(sees_room)
        (order, *_) = first.orders
        assert (order.target.worker_id, order.target.group_id) in (
            ("w1", "group-w1"),
            ("w2", "group-w2"),
        )
        assert order.target.address and order.target.epoch == 1 and not order.if_cheaper
        answer = await move(address, "w0", "w1", 2)
        assert (answer.target_worker_id, answer.moved) == ("w1", 2)
        assert "no further request" in answer.reason
        assert first.introduced[-1] == second.introduced[-1] == ["w0", "w1"]
        assert len({order.order for order in first.orders}) == len(first.orders)
        assert not (second.orders or third.orders)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("w9", "", "no group with worker 'w9' serves"),
        ("w0", "w0", "the same worker"),
        ("w0", "w1", "do not run the same weights"),
        ("w0", "w2", "do not run the same version of the code"),
        ("w0", "w3", "w3 is leaving"),
        ("w0", "", "no other worker can take requests of w0"),
    ],
)
async def test_an_impossible_move_is_refused_with_the_reason(
    store: Store, source: str, target: str, message: str
) -> None:
    others = ({"model_digest": "other"}, {"code_digest": "other"}, {"draining": True})
    async with cluster(store, {}, *others) as (address, members):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await move(address, source, target)
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert message in (raised.value.details() or "")
        assert not any(member.engine.orders for member in members)


async def test_a_worker_checks_fence_and_group(store: Store) -> None:
    async with cluster(store, {}, {}) as (_, members):
        member = members[0]
        await move_directly(member, epoch=1)
        stale = {"token": 2**40 - 1}
        for changes in (stale, {"incarnation": "other"}, {"epoch": 2}, {"group_id": "g"}):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await move_directly(member, **changes)
            assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        member.servicer.refuse_all()
        await move_directly(member, epoch=1)  # a worker that is shutting down moves its requests
        assert len(member.engine.orders) == 2


async def test_an_introduction_by_an_earlier_coordinator_is_refused(store: Store) -> None:
    async with cluster(store, {}, {}) as (_, (member, _)):
        await move_directly(member)
        peer = worker_pb2.Peer(worker_id="w0", incarnation=member.record.incarnation)
        request = worker_pb2.IntroduceRequest(
            token=2**40 - 1, incarnation=member.record.incarnation, peers=[peer]
        )
        async with open_channel(member.record.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="a stale Introduce"):
                await member.stub(channel).Introduce(request, timeout=DEADLINE_S)
            request.token += 1
            await member.stub(channel).Introduce(request, timeout=DEADLINE_S)
        assert member.engine.introduced == [["w0"]]


async def move_directly(member: FakeMember, **changes: Any) -> worker_pb2.ShipRequestsResponse:
    fields: dict[str, Any] = {
        "token": 2**40,
        "incarnation": member.record.incarnation,
        "group_id": "group-w0",
        "epoch": 1,
        "order": "o",
        "target": worker_pb2.GoTo(worker_id="w1", address="x:1", group_id="group-w1", epoch=1),
    }
    async with open_channel(member.record.address) as channel:
        request = worker_pb2.ShipRequestsRequest(**(fields | changes))
        return await member.stub(channel).ShipRequests(request, timeout=DEADLINE_S)


async def test_a_leaving_worker_is_ordered_to_move_its_requests(store: Store) -> None:
    async with cluster(store, {"draining": True}, {}, {}) as (_, members):
        member, *others = members
        member.servicer.refuse_all()
        member.engine.running = 5
        await eventually(lambda: member.engine.running == 0)
        orders = member.engine.orders
        assert orders[0].requests_max == 3, "an even share for each of the others"
        assert all(order.if_cheaper for order in orders)
        assert not any(other.engine.orders for other in others)


async def test_a_full_worker_moves_requests_as_the_monitor_decides(store: Store) -> None:
    options = {"rebalance": "stuck", "overload_policy": "recompute"}
    async with cluster(store, {}, {}, **options) as (address, members):
        full, roomy = (member.engine for member in members)
        roomy.blocks_total = roomy.blocks_free = full.blocks_total = 100
        full.blocks_free, full.running = 1, 4
        await eventually(lambda: full.running == 0)
        (order, *_) = full.orders
        assert order.target.worker_id == "w1" and not order.if_cheaper
        assert 24 <= order.blocks_max <= 100, "the KV of a request at least"
        assert not roomy.orders

        async def outcome() -> bool:
            async with open_channel(address) as channel:
                stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
                request = memmgr_pb2.GetClusterRequest()
                decisions = (await stub.GetCluster(request, timeout=DEADLINE_S)).decisions
            moves = [d for d in decisions if "4 moved" in d.outcome]
            if not moves:
                return False
            (decision,) = moves
            assert decision.action == memmgr_pb2.DECISION_ACTION_MOVE
            assert decision.cause == memmgr_pb2.DECISION_CAUSE_FULL
            return list(decision.group_ids) == ["group-w0", "group-w1"]

        await eventually(outcome)


async def test_a_move_that_a_worker_refuses_is_reported(store: Store) -> None:
    async with cluster(store, {}, {}, rebalance="stuck") as (address, members):
        full, roomy = (member.engine for member in members)
        full.refuse = "not now"
        roomy.blocks_total = roomy.blocks_free = full.blocks_total = 100
        full.blocks_free, full.running = 1, 4
        await eventually(lambda: len(full.orders) >= 2)  # it backs off and retries
        async with open_channel(address) as channel:
            stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
            request = memmgr_pb2.GetClusterRequest()
            decisions = (await stub.GetCluster(request, timeout=DEADLINE_S)).decisions
        assert any("not now" in decision.outcome for decision in decisions)


async def test_a_move_ends_after_its_caller_disconnects(store: Store) -> None:
    async with cluster(store, {}, {}) as (address, members):
        engine = members[0].engine
        engine.go.clear()
        call = asyncio.create_task(move(address, "w0", "w1"))
        await eventually(lambda: len(engine.orders) == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

        async def outcome() -> bool:
            async with open_channel(address) as channel:
                stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
                request = memmgr_pb2.GetClusterRequest()
                (decision,) = (await stub.GetCluster(request, timeout=DEADLINE_S)).decisions
            return "its caller is gone" in decision.outcome

        await eventually(outcome)
        engine.go.set()


async def test_a_refused_order_is_repeated_later(store: Store) -> None:
    async with cluster(store, {"draining": True}, {}) as (_, members):
        member = members[0]
        member.engine.refuse, member.engine.running = "not now", 2
        await eventually(lambda: len(member.engine.orders) == 1)
        member.engine.refuse = ""
        await eventually(lambda: member.engine.running == 0)
        assert len(member.engine.orders) >= 2


async def test_workers_with_roles_are_kept_connected(store: Store) -> None:
    """w1 hands nothing over, as a worker of an older release, so it is mixed."""
    able = {"capabilities": [GENERATE, CAN_DROP, HAND_OVER]}
    async with cluster(store, able, {}, able, roles="prefill=1,decode=1") as (_address, members):
        first, second, third = (member.engine for member in members)

        async def are_introduced() -> bool:
            return all(["w0", "w2"] in engine.introduced for engine in (first, third))

        await eventually(are_introduced)
        assert not second.introduced
        assert not any(engine.orders for engine in (first, second, third))


async def test_mixed_workers_are_not_introduced(store: Store) -> None:
    async with cluster(store, {}, {}) as (address, members):
        await move(address, "w0", "w1", 1)  # roles would have been assigned by then
        introduced = [pair for member in members for pair in member.engine.introduced]
        assert introduced == [["w0", "w1"]] * 2
