"""Whether other workers need a leaving worker, and where its requests may go."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from services.core.report import EngineReport, Load, OtherRoom
from services.worker.drain import is_needed
from services.worker.group_view import Place
from services.worker.request_returns import RequestReturns
from tests.support.waiting import eventually
from tideserve.common.v1 import record_pb2
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

IDLE = EngineReport(Load(0, 0, 10, 0, kv_blocks_total=10), epoch=4)
BUSY = replace(IDLE, load=Load(1, 0, 9, 0, kv_blocks_total=10))
ALONE = Place("g", 4, leads=True)
SHARED = Place("g", 4, leads=False, shared=True)


@pytest.mark.parametrize(
    ("report", "place", "active", "needed"),
    [
        (IDLE, None, 1, False),
        (IDLE, ALONE, 0, False),
        (BUSY, ALONE, 1, False),
        (IDLE, SHARED, 0, False),
        (IDLE, SHARED, 1, True),
        (BUSY, SHARED, 0, True),
        (replace(IDLE, epoch=3), ALONE, 0, True),
        (replace(IDLE, unsettled=True), ALONE, 0, True),
        (replace(IDLE, epoch=5), ALONE, 0, False),
    ],
)
def test_a_worker_waits_while_others_need_its_data(
    report: EngineReport, place: Place | None, active: int, needed: bool
) -> None:
    assert is_needed(report, place, active) is needed


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Reports room in two groups, except for the first call."""

    def __init__(self) -> None:
        self.requests: list[scheduler_pb2.FindRoomRequest] = []

    async def FindRoom(
        self, request: scheduler_pb2.FindRoomRequest, _context: object
    ) -> scheduler_pb2.FindRoomResponse:
        self.requests.append(request)
        if len(self.requests) == 1:
            return scheduler_pb2.FindRoomResponse()
        return scheduler_pb2.FindRoomResponse(longest_tokens=9, group_tokens=(3, 4))


@asynccontextmanager
async def returning(
    scheduler: scheduler_pb2_grpc.SchedulerServiceServicer,
) -> AsyncIterator[list[OtherRoom]]:
    """A leaving worker; yields the requests that its engine receives."""
    rooms: list[OtherRoom] = []

    async def receive(room: OtherRoom) -> None:
        rooms.append(room)

    unused = cast(Any, None)
    record = record_pb2.WorkerRecord(worker_id="w", model="m")
    engine = cast(Any, SimpleNamespace(return_requests=receive))
    returns = RequestReturns(engine, record, unused, unused)
    server = grpc.aio.server()
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        task = asyncio.create_task(returns._return_requests(returns._request, channel))
        yield rooms
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await server.stop(0)


async def test_the_engine_learns_the_room_in_other_groups() -> None:
    scheduler = Scheduler()
    async with returning(scheduler) as rooms:
        await eventually(lambda: len(rooms) >= 2)
    assert rooms[:2] == [OtherRoom(), OtherRoom(9, (3, 4))]
    assert (scheduler.requests[0].worker_id, scheduler.requests[0].model) == ("w", "m")


async def test_an_older_scheduler_reports_no_room() -> None:
    called = asyncio.Event()

    class Older(scheduler_pb2_grpc.SchedulerServiceServicer):
        async def FindRoom(self, _request: object, context: Any) -> Any:
            called.set()
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")

    async with returning(Older()) as rooms:
        await asyncio.wait_for(called.wait(), 20)
        await asyncio.sleep(0.05)
    assert rooms == []
