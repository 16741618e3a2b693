"""Lets the engine return requests to the scheduler, as long as other groups have room for them.

That happens when a worker shuts down, and while its upstream server is gone. The scheduler reports
the room.
"""

import asyncio
import logging
from functools import partial

import grpc
import grpc.aio

from services.common.grpc_client import Dial
from services.common.membership import Directory
from services.common.push import keep_pushing
from services.core.report import EngineReport, OtherRoom
from services.worker.engine_client import EngineClient
from tideserve.common.v1 import record_pb2
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

ROOM_INTERVAL_S = 0.1
"""Interval at which the scheduler is asked for room in other groups."""
ROOM_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class RequestReturns:
    """Passes the room of other groups to the engine of the worker in `record`."""

    def __init__(
        self,
        engine: EngineClient,
        record: record_pb2.WorkerRecord,
        services: Directory[record_pb2.ServiceRecord],
        dial: Dial,
    ) -> None:
        self._engine = engine
        self._services = services
        self._dial = dial
        self._request = scheduler_pb2.FindRoomRequest(
            worker_id=record.worker_id, model=record.model
        )
        self._request_in_outage = scheduler_pb2.FindRoomRequest(
            worker_id=record.worker_id, model=record.model, outage=True
        )
        self._outage = asyncio.Event()
        self._no_outage = asyncio.Event()

    async def run(self) -> None:
        """Return requests until cancelled; without a scheduler they stay."""
        await self._run(self._request)

    async def _run(self, request: scheduler_pb2.FindRoomRequest) -> None:
        push = partial(self._return_requests, request)
        await keep_pushing(self._services, "scheduler", push, self._dial)

    def note(self, report: EngineReport) -> None:
        """Update from a report of the engine."""
        current, former = self._outage, self._no_outage
        if not report.outage:
            current, former = former, current
        current.set()
        former.clear()

    async def run_in_outages(self) -> None:
        """Return requests whenever the engine reports an outage, until cancelled."""
        while True:
            await self._outage.wait()
            returning = asyncio.create_task(self._run(self._request_in_outage))
            try:
                await self._no_outage.wait()
            finally:
                returning.cancel()
                await asyncio.gather(returning, return_exceptions=True)

    async def _return_requests(
        self, request: scheduler_pb2.FindRoomRequest, channel: grpc.aio.Channel
    ) -> None:
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        while True:
            try:
                answer = await scheduler.FindRoom(request, timeout=ROOM_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                log.info("the scheduler is of an older version: requests stay here")
                await asyncio.Event().wait()
            else:
                room = OtherRoom(answer.longest_tokens, tuple(answer.group_tokens))
                await self._engine.return_requests(room)
            await asyncio.sleep(ROOM_INTERVAL_S)
