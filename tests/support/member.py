"""A registered worker with the real group member, and an engine that only records calls."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.grpc_server import ProcessServicer, Server
from services.common.membership import GROUPS, WORKERS, Directory
from services.core.groups.fence import MemberState
from services.core.groups.vocabulary import Group, GroupPhase
from services.worker.group_view import stored_groups
from services.worker.identity import registration_conditions
from services.worker.ipc import Shipped, ShipRequests
from services.worker.member.participant import PrepareRefused, ProposedChange, SourceMember
from services.worker.member.servicer import MemberServicer
from tests.support.control_plane import registered, worker_record
from tests.support.waiting import eventually
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.worker.v1 import worker_pb2, worker_pb2_grpc

LAYERS = 4
SHAPE = record_pb2.ModelShape(num_layers=LAYERS, layer_bytes=10_000, kv_bytes=2)
BLOCK_TOKENS = 16
ARENA_BYTES = LAYERS * (10_000 + 100 * BLOCK_TOKENS * 2)


@dataclass
class FakeEngine:
    """Records which layers it holds; refuses or delays preparations when configured to."""

    name: str
    held: set[int] = field(default_factory=lambda: set(range(LAYERS)))
    staged: dict[str, set[int]] = field(default_factory=dict)
    serving: Group | None = None
    refuse: str = ""
    go: asyncio.Event = field(default_factory=asyncio.Event)
    preparations: list[ProposedChange] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    introduced: list[list[str]] = field(default_factory=list)
    orders: list[ShipRequests] = field(default_factory=list)
    running: int = 0
    tokens: list[int] = field(default_factory=list)
    blocks_total: int = 0
    blocks_free: int = 0
    settled: bool = True

    def __post_init__(self) -> None:
        self.go.set()

    @property
    def epoch(self) -> int:
        return self.serving.epoch if self.serving is not None else 0

    async def prepare(self, preparation: ProposedChange) -> None:
        self.preparations.append(preparation)
        await self.go.wait()
        if self.refuse:
            raise PrepareRefused(self.refuse)
        self.staged[preparation.attempt] = self._layers(preparation.target) - self.held

    async def introduce(self, peers: tuple[SourceMember, ...], timeout_s: float) -> None:
        self.introduced.append([peer.worker_id for peer in peers])

    async def ship(self, command: ShipRequests) -> Shipped:
        self.orders.append(command)
        await self.go.wait()
        if self.refuse:
            raise PrepareRefused(self.refuse)
        moved = min(self.running, command.requests_max or self.running)
        self.running -= moved
        return Shipped(command.order, moved, 0, "no further request can move now")

    async def abort(self, attempt: str) -> None:
        self.staged.pop(attempt, None)
        self.aborted.append(attempt)

    async def commit(self, group: Group, attempt: str | None, superseded: str | None) -> None:
        self.held |= self.staged.get(attempt or superseded or "", set())
        self.staged.clear()
        if group.phase is GroupPhase.STABLE:
            self.held &= self._layers(group)
            assert self.held == self._layers(group), "I1: serves without its layers"
        self.serving = group

    def _layers(self, group: Group) -> set[int]:
        return {
            layer
            for member in group.members
            if member.worker_id == self.name
            for layer in range(member.first_layer, member.end_layer)
        }


@dataclass
class FakeMember:
    """A worker's member service and its group directory."""

    engine: FakeEngine
    record: record_pb2.WorkerRecord
    directory: Directory[record_pb2.GroupRecord]
    servicer: MemberServicer

    @property
    def name(self) -> str:
        return self.engine.name

    def stub(self, channel: Any) -> "worker_pb2_grpc.MemberServiceStub":
        return worker_pb2_grpc.MemberServiceStub(channel)


@asynccontextmanager
async def member(
    store: Store, name: str, ttl_s: int = 30, **record: Any
) -> AsyncIterator[FakeMember]:
    """Run a registered member that reports its epoch."""
    server = Server("127.0.0.1", 0, ProcessServicer(name, list, lambda: True))
    engine = FakeEngine(name)
    fields = {
        "incarnation": f"{name}-a",
        "shape": SHAPE,
        "arena_bytes": ARENA_BYTES,
        "bulk_address": f"{name}:9",
    }
    incarnation = (fields | record)["incarnation"]
    servicers: list[MemberServicer] = []
    directory = Directory(
        store,
        GROUPS,
        record_pb2.GroupRecord,
        lambda: [servicer.note_records(directory.rollbacks) for servicer in servicers] and None,
    )
    state = MemberState(name, incarnation)
    servicers.append(MemberServicer(state, engine, lambda: stored_groups(directory)))
    worker_pb2_grpc.add_MemberServiceServicer_to_server(servicers[0], server.services)
    await server.start()
    entry = worker_record(name, **(fields | {"address": server.address} | record))
    try:
        async with registered(
            store,
            f"{WORKERS}{name}",
            entry,
            ttl_s,
            partial(registration_conditions, store, state),
        ):
            tasks = [asyncio.create_task(part.run()) for part in (servicers[0], directory)]
            try:
                yield FakeMember(engine, entry, directory, servicers[0])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
    finally:
        await server.stop(0)


async def all_serve(address: str, *members: FakeMember) -> None:
    """Wait until the members serve and the memory manager at `address` lists them."""
    async with open_channel(address) as channel:
        stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)

        async def known() -> bool:
            answer = await stub.ListGroups(memmgr_pb2.ListGroupsRequest(), timeout=30)
            listed = {member.worker_id for group in answer.groups for member in group.members}
            return listed >= {
                member.name for member in members if member.engine.serving is not None
            }

        await eventually(lambda: all(member.engine.serving for member in members))
        await eventually(known)


@asynccontextmanager
async def reporting(address: str, *members: FakeMember) -> AsyncIterator[None]:
    """Report the members' memory to a memory manager during the body."""

    async def reports(member: FakeMember) -> AsyncIterator[memmgr_pb2.ReportMemoryRequest]:
        while True:
            yield memmgr_pb2.ReportMemoryRequest(
                memory=memmgr_pb2.WorkerMemory(
                    worker_id=member.name,
                    incarnation=member.record.incarnation,
                    epoch=member.engine.epoch,
                    unsettled=not member.engine.settled,
                    budget_bytes=ARENA_BYTES,
                    parameter_bytes=len(member.engine.held) * SHAPE.layer_bytes,
                    kv_block_bytes=BLOCK_TOKENS * SHAPE.kv_bytes * LAYERS,
                    kv_blocks_total=member.engine.blocks_total,
                    kv_blocks_free=member.engine.blocks_free,
                    running=member.engine.running,
                )
            )
            await asyncio.sleep(0.1)

    async with open_channel(address) as channel:
        stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
        calls = [stub.ReportMemory(reports(member)) for member in members]
        try:
            yield
        finally:
            for call in calls:
                call.cancel()


def prepare_request(target: record_pb2.GroupRecord, **changes: Any) -> worker_pb2.PrepareRequest:
    """A request to w0, which is in group-w0 at epoch 1."""
    fields: dict[str, Any] = {
        "token": 7,
        "attempt": "7-1",
        "incarnation": "w0-a",
        "group_id": "group-w0",
        "epoch": 1,
        "mod_revision": 10**9,
        "target": target,
    }
    return worker_pb2.PrepareRequest(**(fields | changes))
