"""Services in this process, and fakes of their peers."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from google.protobuf.message import Message

from services.common.etcd import SameCreation, Store
from services.common.grpc_client import open_channel
from services.common.membership import GROUPS, SERVICES, WORKERS, Claim, Registration
from services.common.records import decode_record, encode_record
from services.common.transport import Transport
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import load_pb2, record_pb2
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

LEASE_TTL_S = 30
"""A lease that a process renews in time even on a busy machine."""
SHORT_LEASE_TTL_S = 2
"""A short lease, for tests that wait for its expiry."""


@asynccontextmanager
async def open_store(url: str) -> AsyncIterator[Store]:
    """A connected store."""
    store = Store(url)
    await store.connect(timeout_s=DEADLINE_S)
    try:
        yield store
    finally:
        await store.close()


async def wipe(store: Store) -> None:
    """Delete all of our keys."""
    for key, entry in (await store.list_prefix("")).items():
        await store.transact([SameCreation(key, entry.create_revision)], {}, [key])


async def delete(store: Store, key: str) -> None:
    """Delete an existing key."""
    created = (await store.list_prefix(key))[key].create_revision
    assert await store.transact([SameCreation(key, created)], {}, [key])


async def put(store: Store, key: str, record: Message) -> None:
    """Write a record unconditionally."""
    entry = (await store.list_prefix(key)).get(key)
    assert await store.put_if(key, encode_record(record), entry.mod_revision if entry else 0)


async def read_group(store: Store, worker_id: str) -> record_pb2.GroupRecord | None:
    """The record of a worker's group, or None."""
    key = f"{GROUPS}group-{worker_id}"
    entry = (await store.list_prefix(key)).get(key)
    return decode_record(record_pb2.GroupRecord, entry.value) if entry is not None else None


@asynccontextmanager
async def serving(
    serve: Callable[[Any, asyncio.Event], Coroutine[Any, Any, None]], config: Any
) -> AsyncIterator[asyncio.Event]:
    """Run a service's `serve` beside the body; drain it at the end, or when the event is set."""
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(serve(config, stop))
        try:
            yield stop
        finally:
            stop.set()
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait([task])


async def service_address(store: Store, name: str) -> str:
    """Wait for a service to register; returns the address of its newest instance."""

    async def find() -> str:
        listing = await store.list_prefix(f"{SERVICES}{name}/")
        if not listing:
            return ""
        newest = max(listing.values(), key=lambda entry: entry.create_revision)
        record = decode_record(record_pb2.ServiceRecord, newest.value)
        return record.address if record is not None else ""

    return await eventually(find)


@asynccontextmanager
async def registered(
    store: Store,
    key: str,
    record: Message,
    ttl_s: int = LEASE_TTL_S,
    claim: Claim | None = None,
) -> AsyncIterator[Registration]:
    """Register a record on a lease during the body."""
    registration = Registration(store, key, record, ttl_s, claim)
    task = asyncio.create_task(registration.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            await registration.registered.wait()
        yield registration
    finally:
        task.cancel()
        await asyncio.wait([task])
        await registration.withdraw()


def worker_record(worker_id: str = "w0", **changes: Any) -> record_pb2.WorkerRecord:
    """A valid worker record."""
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": f"{worker_id}-a",
        "address": "127.0.0.1:1",
        "model": "m",
        "max_model_len": 1024,
        "block_size": 16,
        "kv_blocks_total": 100,
        "capabilities": ["generate", "parameter_drop"],
    }
    return record_pb2.WorkerRecord(**(fields | changes))


def group_record(worker: record_pb2.WorkerRecord, epoch: int = 1) -> record_pb2.GroupRecord:
    """The stable group of one worker."""
    member = record_pb2.GroupMember(worker_id=worker.worker_id, incarnation=worker.incarnation)
    return record_pb2.GroupRecord(
        group_id=f"group-{worker.worker_id}",
        epoch=epoch,
        phase=record_pb2.GROUP_PHASE_STABLE,
        members=[member],
        model=worker.model,
    )


@asynccontextmanager
async def worker_in_group(
    store: Store, worker: record_pb2.WorkerRecord, epoch: int = 1, ttl_s: int = LEASE_TTL_S
) -> AsyncIterator[None]:
    """A registered worker with a group, as the memory manager would have written it."""
    async with registered(store, f"{WORKERS}{worker.worker_id}", worker, ttl_s):
        group = group_record(worker, epoch)
        await put(store, f"{GROUPS}{group.group_id}", group)
        yield


class FakeWorker:
    """Reports a load that the test sets, every 100 ms."""

    def __init__(self, record: record_pb2.WorkerRecord, epoch: int = 1) -> None:
        self.record = record
        self.load = load_pb2.WorkerLoad(
            worker_id=record.worker_id,
            incarnation=record.incarnation,
            epoch=epoch,
            kv_blocks_free=record.kv_blocks_total,
        )

    @asynccontextmanager
    async def reporting(
        self, address: str, transport: Transport | None = None
    ) -> AsyncIterator[None]:
        """Report to the scheduler during the body."""
        async with (transport or Transport()).dial(address, "scheduler") as channel:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).ReportLoad(self.reports())
            try:
                yield
            finally:
                call.cancel()

    async def reports(self) -> AsyncIterator[scheduler_pb2.ReportLoadRequest]:
        """The reports, endlessly."""
        while True:
            self.load.number += 1
            yield scheduler_pb2.ReportLoadRequest(load=self.load)
            await asyncio.sleep(0.1)


class FakeGateway:
    """One Admit stream; keeps every frame, by request id."""

    def __init__(self, call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
        self._call = call
        self.frames: dict[str, list[scheduler_pb2.AdmitResponse]] = defaultdict(list)
        self.heartbeats: list[scheduler_pb2.Heartbeat] = []
        self.ended = False

    @classmethod
    @asynccontextmanager
    async def connected(cls, address: str) -> AsyncIterator["FakeGateway"]:
        """A gateway with a stream to the scheduler."""
        async with open_channel(address) as channel:
            call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Admit()
            gateway = cls(call)
            reading = asyncio.create_task(gateway._read())
            try:
                yield gateway
            finally:
                call.cancel()
                reading.cancel()
                await asyncio.wait([reading])

    async def forward_load(self, load: load_pb2.WorkerLoad) -> None:
        """Forward a worker's load."""
        await self._call.write(scheduler_pb2.AdmitRequest(load=load))

    async def ask(self, request_id: str, **changes: Any) -> None:
        """Request admission."""
        fields: dict[str, Any] = {"model": "m", "prompt_tokens": 32, "max_tokens": 64}
        ask = scheduler_pb2.Ask(request_id=request_id, **(fields | changes))
        await self._call.write(scheduler_pb2.AdmitRequest(ask=ask))

    async def send(self, frame: scheduler_pb2.AdmitRequest) -> None:
        """Send any frame."""
        await self._call.write(frame)

    async def assignment(self, request_id: str) -> scheduler_pb2.Assignment:
        """Wait for the assignment of a request."""
        return (await self._first(request_id, "assignment")).assignment

    async def ticket(self, request_id: str) -> None:
        """Wait for the ticket of a request."""
        await self._first(request_id, "ticket")

    async def refusal(self, request_id: str) -> scheduler_pb2.Refusal:
        """Wait for the refusal of a request."""
        return (await self._first(request_id, "refusal")).refusal

    async def _first(self, request_id: str, kind: str) -> scheduler_pb2.AdmitResponse:
        def matching() -> list[scheduler_pb2.AdmitResponse]:
            return [f for f in self.frames[request_id] if f.WhichOneof("body") == kind]

        return (await eventually(matching, interval_s=0.01))[0]

    async def _read(self) -> None:
        try:
            async for frame in self._call:
                match frame.WhichOneof("body"):
                    case "heartbeat":
                        self.heartbeats.append(frame.heartbeat)
                    case str(kind):
                        self.frames[getattr(frame, kind).request_id].append(frame)
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.ended = True
