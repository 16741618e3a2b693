"""The scheduler with a real etcd, a fake gateway and a fake worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from services.common.config import from_mapping
from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.membership import GROUPS, ROLES, SERVICES, WORKERS
from services.common.records import decode_record, to_role_record
from services.common.timeouts import timeout
from services.core.role import Role
from services.core.scheduler.admission import AWAY_RETRY_S
from services.scheduler import servicer
from services.scheduler.app import serve
from services.scheduler.config import SchedulerConfig
from tests.support.control_plane import (
    LEASE_TTL_S,
    SHORT_LEASE_TTL_S,
    FakeGateway,
    FakeWorker,
    group_record,
    put,
    registered,
    service_address,
    serving,
    worker_in_group,
    worker_record,
)
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import eventually
from tideserve.common.v1 import load_pb2, process_pb2, process_pb2_grpc, record_pb2
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tideserve.worker.v1 import worker_pb2


@asynccontextmanager
async def scheduler(store: Store, **changes: object) -> AsyncIterator[str]:
    """A running scheduler; yields its address."""
    options = {"etcd_url": store.url, "lease_ttl_s": LEASE_TTL_S, "gateway_grace_s": 0.5}
    async with serving(serve, from_mapping(SchedulerConfig, options | changes, "a test")):
        yield await service_address(store, "scheduler")


@asynccontextmanager
async def serving_worker(
    store: Store, worker: FakeWorker, **changes: object
) -> AsyncIterator[FakeGateway]:
    """A scheduler with a worker's report, and a connected gateway."""
    async with (
        scheduler(store, **changes) as address,
        worker_in_group(store, worker.record, epoch=worker.load.epoch),
        worker.reporting(address),
        FakeGateway.connected(address) as gateway,
    ):
        await groups_serving(gateway, 1)
        yield gateway


async def queued(gateway: FakeGateway, count: int) -> None:
    """Wait for a heartbeat with this queue length."""
    await eventually(lambda: gateway.heartbeats and gateway.heartbeats[-1].queued == count)


async def groups_serving(gateway: FakeGateway, count: int) -> None:
    await eventually(lambda: gateway.heartbeats and gateway.heartbeats[-1].groups_serving == count)


async def test_ask_ticket_assignment(store: Store) -> None:
    worker = FakeWorker(worker_record(address="10.0.0.7:70"), epoch=4)
    async with serving_worker(store, worker) as gateway:
        await gateway.ask("r1")
        assignment = await gateway.assignment("r1")
        assert assignment == scheduler_pb2.Assignment(
            request_id="r1",
            group_id="group-w0",
            epoch=4,
            worker_id="w0",
            address="10.0.0.7:70",
        )
        kinds = [frame.WhichOneof("body") for frame in gateway.frames["r1"]]
        assert kinds == ["ticket", "assignment"]


async def test_a_gateway_is_notified_at_once_that_a_group_serves(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicer, "HEARTBEAT_S", 3600.0)
    record = worker_record()
    async with scheduler(store) as address, FakeGateway.connected(address) as gateway:
        await groups_serving(gateway, 0)
        async with worker_in_group(store, record), FakeWorker(record).reporting(address):
            await groups_serving(gateway, 1)
        assert [heartbeat.groups_serving for heartbeat in gateway.heartbeats] == [0, 1]


async def test_workers_with_other_scheduling_are_warned_of_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the last worker serves, the scheduler has checked all workers, more than once."""

    def warnings() -> list[str]:
        return [
            line.getMessage() for line in caplog.records if "TIDESERVE__SCHEDULING" in line.message
        ]

    alike, other = worker_record("w0", scheduling="slo"), worker_record("w1", scheduling="fcfs")
    third = worker_record("w2", scheduling="priority")
    async with scheduler(store, scheduling="slo") as address:
        entries = await store.list_prefix(f"{SERVICES}scheduler/")
        (record,) = (
            decode_record(record_pb2.ServiceRecord, entry.value) for entry in entries.values()
        )
        assert record is not None and record.scheduling == "slo"
        async with (
            worker_in_group(store, alike),
            FakeGateway.connected(address) as gateway,
            FakeWorker(alike).reporting(address),
        ):
            await groups_serving(gateway, 1)
            assert warnings() == []
            async with (
                worker_in_group(store, other),
                worker_in_group(store, third),
                FakeWorker(other).reporting(address),
                FakeWorker(third).reporting(address),
            ):
                await groups_serving(gateway, 3)
                (warning,) = warnings()
    assert "runs with scheduling slo, but workers with fcfs (w1)" in warning


async def test_a_merged_group_is_reached_at_its_leader(store: Store) -> None:
    leader, follower = worker_record("w1", address="10.0.0.7:70"), worker_record("w0")
    merged = group_record(leader, epoch=5)
    merged.members.add(worker_id="w0", incarnation="w0-a")
    loads = FakeWorker(leader, epoch=5), FakeWorker(follower, epoch=5)
    loads[0].load.kv_blocks_free = 0
    async with (
        scheduler(store) as address,
        registered(store, f"{WORKERS}w0", follower),
        registered(store, f"{WORKERS}w1", leader),
        loads[0].reporting(address),
        loads[1].reporting(address),
        FakeGateway.connected(address) as gateway,
    ):
        await put(store, f"{GROUPS}group-w1", merged)
        await groups_serving(gateway, 1)
        await gateway.ask("r1")
        await queued(gateway, 1)
        loads[0].load.kv_blocks_free = 100
        assignment = await gateway.assignment("r1")
        assert (assignment.worker_id, assignment.address) == ("w1", "10.0.0.7:70")
        assert (assignment.group_id, assignment.epoch) == ("group-w1", 5)


async def test_recorded_roles_name_the_decoding_worker(store: Store) -> None:
    first, other = worker_record("w0", address="h:1"), worker_record("w1", address="h:2")
    async with (
        scheduler(store, hand_over_min_tokens=10) as address,
        worker_in_group(store, first, epoch=3),
        worker_in_group(store, other, epoch=4),
        FakeWorker(first, epoch=3).reporting(address),
        FakeWorker(other, epoch=4).reporting(address),
        FakeGateway.connected(address) as gateway,
    ):
        await groups_serving(gateway, 2)
        await gateway.ask("r0", prompt_tokens=40)
        assert not (await gateway.assignment("r0")).HasField("hand_to")
        for worker_id, role in (("w0", Role.DECODE), ("w1", Role.PREFILL)):
            await put(store, f"{ROLES}{worker_id}", to_role_record(worker_id, role, 1.0))
        for number in range(1, 200):  # until the records are read
            await gateway.ask(f"r{number}", prompt_tokens=40)
            assignment = await gateway.assignment(f"r{number}")
            if assignment.HasField("hand_to"):
                break
            await asyncio.sleep(0.05)
    assert assignment.worker_id == "w1"
    place = worker_pb2.GoTo(worker_id="w0", address="h:1", group_id="group-w0", epoch=3)
    assert assignment.hand_to == place


async def test_a_request_waits_for_room(store: Store) -> None:
    worker = FakeWorker(worker_record())
    worker.load.kv_blocks_free = 0
    async with serving_worker(store, worker) as gateway:
        await gateway.ask("r1")
        await queued(gateway, 1)
        worker.load.kv_blocks_free = 3
        await gateway.assignment("r1")


async def test_the_queue_is_full(store: Store) -> None:
    async with (
        scheduler(store, queue_limit=2) as address,
        FakeGateway.connected(address) as gateway,
    ):
        for request_id in ("r1", "r2", "r3"):
            await gateway.ask(request_id)
        refusal = await gateway.refusal("r3")
        assert refusal.reason == scheduler_pb2.REFUSAL_REASON_QUEUE_FULL
        assert 1 <= refusal.retry_after_s <= 60
        await gateway.send(
            scheduler_pb2.AdmitRequest(withdraw=scheduler_pb2.Withdraw(request_id="r1"))
        )
        await gateway.ask("r4")
        await gateway.ticket("r4")


async def test_the_deadline_passes(store: Store) -> None:
    async with (
        scheduler(store, queue_deadline_s=0.3) as address,
        FakeGateway.connected(address) as gateway,
    ):
        await gateway.ask("r1")
        refusal = await gateway.refusal("r1")
        assert refusal.reason == scheduler_pb2.REFUSAL_REASON_EXPIRED
        assert "0.3 s" in refusal.message


async def test_too_large_and_unknown_model(store: Store) -> None:
    async with serving_worker(store, FakeWorker(worker_record())) as gateway:
        await gateway.ask("r1", prompt_tokens=1000, max_tokens=25)
        assert (await gateway.refusal("r1")).reason == scheduler_pb2.REFUSAL_REASON_TOO_LARGE
        await gateway.ask("r2", model="other")
        refusal = await gateway.refusal("r2")
        assert refusal.reason == scheduler_pb2.REFUSAL_REASON_UNKNOWN_MODEL
        assert refusal.retry_after_s == AWAY_RETRY_S


async def test_invalid_frames_do_not_end_the_stream(store: Store) -> None:
    async with scheduler(store) as address, FakeGateway.connected(address) as gateway:
        await gateway.send(scheduler_pb2.AdmitRequest())
        await gateway.ask("r1", prompt_tokens=-1)
        await gateway.ask("r2", waited_s=float("nan"))
        await gateway.ask("r3")
        assert (await gateway.refusal("r1")).reason == scheduler_pb2.REFUSAL_REASON_INVALID
        assert (await gateway.refusal("r2")).reason == scheduler_pb2.REFUSAL_REASON_INVALID
        await gateway.ticket("r3")
        assert not gateway.ended


async def test_a_restarted_scheduler_is_asked_again(store: Store) -> None:
    async with scheduler(store) as address, FakeGateway.connected(address) as gateway:
        await gateway.ask("r1")
        await gateway.ticket("r1")
    # The drain has closed the stream and withdrawn the record.
    assert gateway.ended
    assert await store.list_prefix(f"{SERVICES}scheduler/") == {}

    record = worker_record()
    async with (
        # Otherwise the older request would be late and queue behind the other.
        scheduler(store, standard_wait_s=0.0) as address,
        worker_in_group(store, record),
        FakeGateway.connected(address) as gateway,
    ):
        await gateway.ask("r2", waited_s=1.0)
        await gateway.ask("r1", waited_s=10.0)
        await gateway.ticket("r1")
        worker = FakeWorker(record)
        worker.load.kv_blocks_free = 4  # room for one request
        async with worker.reporting(address):
            await gateway.assignment("r1")
            assert [f.WhichOneof("body") for f in gateway.frames["r2"]] == ["ticket"]


async def test_a_reconnected_gateway_gets_its_answers(store: Store) -> None:
    record = worker_record()
    async with (
        scheduler(store, gateway_grace_s=60.0) as address,
        worker_in_group(store, record),
        FakeWorker(record).reporting(address),
    ):
        async with FakeGateway.connected(address) as gateway:
            await gateway.ask("r1")
            first = await gateway.assignment("r1")
        async with FakeGateway.connected(address) as gateway:
            await gateway.ask("r1", waited_s=1.0)
            assert await gateway.assignment("r1") == first


async def test_an_absent_gateway_loses_its_queue_entries(store: Store) -> None:
    async with scheduler(store, gateway_grace_s=0.3) as address:
        async with FakeGateway.connected(address) as gone:
            await gone.ask("r1")
            await gone.ticket("r1")
        async with FakeGateway.connected(address) as gateway:
            await queued(gateway, 0)


async def test_a_stale_epoch_is_asked_again(store: Store) -> None:
    record = worker_record()
    worker = FakeWorker(record, epoch=1)
    async with serving_worker(store, worker) as gateway:
        await gateway.ask("r1")
        assert (await gateway.assignment("r1")).epoch == 1
        await put(store, f"{GROUPS}group-w0", group_record(record, epoch=2))
        await groups_serving(gateway, 0)
        worker.load.epoch = 2
        gateway.frames["r1"].clear()
        await gateway.ask("r1", refused_epoch=1, refused_group_id="group-w0", waited_s=1.0)
        assert (await gateway.assignment("r1")).epoch == 2


async def test_a_worker_without_reports_gets_no_requests(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By its record and last report alone, it would serve for a minute.
    monkeypatch.setattr("services.core.scheduler.group_load.REPORT_FRESH_S", 60.0)
    dead, alive = worker_record("w0"), worker_record("w1")
    busy = FakeWorker(alive)
    busy.load.running = 9
    async with (
        scheduler(store) as address,
        worker_in_group(store, dead),
        worker_in_group(store, alive),
        busy.reporting(address),
        FakeGateway.connected(address) as gateway,
    ):
        async with FakeWorker(dead).reporting(address):
            await groups_serving(gateway, 2)
            await gateway.ask("r1")
            assert (await gateway.assignment("r1")).worker_id == "w0"
        await groups_serving(gateway, 1)
        for number in range(2, 6):
            await gateway.ask(f"r{number}")
            assert (await gateway.assignment(f"r{number}")).worker_id == "w1"


async def test_a_worker_with_an_expired_lease_gets_no_requests(store: Store) -> None:
    record = worker_record()
    async with (
        scheduler(store) as address,
        FakeWorker(record).reporting(address),
        FakeGateway.connected(address) as gateway,
    ):
        async with worker_in_group(store, record):
            await groups_serving(gateway, 1)
        await groups_serving(gateway, 0)
        await gateway.ask("r1")
        await queued(gateway, 1)
        # Another incarnation in the old group record is not a member.
        async with worker_in_group(store, worker_record(incarnation="w0-b")):
            await put(store, f"{GROUPS}group-w0", group_record(record))
            await gateway.ask("r2")
            await queued(gateway, 2)


async def test_groups_stay_while_etcd_is_unreachable(store: Store, etcd: EtcdServer) -> None:
    record = worker_record()
    async with (
        scheduler(store, lease_ttl_s=60) as address,
        worker_in_group(store, record, ttl_s=SHORT_LEASE_TTL_S),
        FakeWorker(record).reporting(address),
        FakeGateway.connected(address) as gateway,
    ):
        await groups_serving(gateway, 1)
        etcd.kill()
        await asyncio.sleep(2 * SHORT_LEASE_TTL_S)
        await gateway.ask("r1")
        await gateway.assignment("r1")
        etcd.start()
        await gateway.ask("r2")
        await gateway.assignment("r2")


@pytest.mark.parametrize(
    "report",
    [
        {"worker_id": "w0", "incarnation": "i", "kv_blocks_free": -1},
        {"worker_id": "w0", "incarnation": "i", "epoch": -1},
        {"worker_id": "", "incarnation": "i"},
    ],
)
async def test_an_impossible_report_is_refused(store: Store, report: dict[str, object]) -> None:
    async with scheduler(store) as address, open_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def reports() -> AsyncIterator[scheduler_pb2.ReportLoadRequest]:
            load = load_pb2.WorkerLoad(**report)  # type: ignore[arg-type]
            yield scheduler_pb2.ReportLoadRequest(load=load)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ReportLoad(reports(), timeout=30)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reports_are_accepted_before_the_stream_ends(store: Store) -> None:
    """Otherwise the worker's gRPC buffers its reports for a retry."""
    worker = FakeWorker(worker_record())
    async with scheduler(store) as address, open_channel(address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).ReportLoad(worker.reports())
        async with timeout(30):
            await call.initial_metadata()
        assert not call.done()


async def test_a_forwarded_load_counts_for_the_gateways_next_ask(store: Store) -> None:
    worker = FakeWorker(worker_record())
    worker.load.kv_blocks_free = 0
    newer = load_pb2.WorkerLoad()
    newer.CopyFrom(worker.load)
    newer.number, newer.kv_blocks_free = 1_000_000, 100
    impossible = load_pb2.WorkerLoad(worker_id="w0", incarnation="w0-a", running=-1)
    async with serving_worker(store, worker) as gateway:
        await gateway.forward_load(impossible)
        await gateway.ask("r1")
        await queued(gateway, 1)
        await gateway.forward_load(newer)
        await gateway.assignment("r1")
        await gateway.ask("r2")
        await gateway.assignment("r2")


async def test_the_scheduler_exports_process_metrics(store: Store) -> None:
    async with scheduler(store) as address, open_channel(address) as channel:
        stub = process_pb2_grpc.ProcessServiceStub(channel)

        async def ready() -> bool:
            answer = await stub.GetProcess(process_pb2.GetProcessRequest(), timeout=30)
            return answer.name == "scheduler" and answer.ready

        await eventually(ready)


async def test_a_gateway_that_does_not_read_is_disconnected(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.scheduler.servicer.WRITE_TIMEOUT_S", 2.0)
    async with (
        scheduler(store) as address,
        FakeGateway.connected(address) as other,
        open_channel(address) as channel,
    ):
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Admit()

        # Refusals repeat the ids, which exceed the connection's buffers by far.
        for number in range(100):
            ask = scheduler_pb2.Ask(request_id=f"{number}" * 100_000)
            await call.write(scheduler_pb2.AdmitRequest(ask=ask))
        await eventually(lambda: "a gateway that does not read" in caplog.text)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.ask("bad", max_tokens=-1)
        await other.refusal("bad")
