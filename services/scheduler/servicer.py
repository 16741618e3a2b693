"""The scheduler's gRPC service: streams of gateways, and load reports of workers.

Gateways send asks (requests for an assignment) and receive tickets, assignments and refusals.
"""

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from services.common.clock import monotonic_s
from services.common.frames import TAKES_MANY, packed, takes_many, unpacked
from services.common.grpc_server import accept_stream
from services.common.report import InvalidReport
from services.common.timeouts import timeout
from services.core.scheduler.vocabulary import LoadLost, LoadReported
from services.scheduler.driver import GatewayOutbox, SchedulerDriver
from services.scheduler.translate import (
    to_admit_event,
    to_frame,
    to_heartbeat,
    to_load_event,
    to_refusals,
)
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

HEARTBEAT_S = 1.0
# A gateway that reads nothing for this long is disconnected; it reconnects and asks again.
WRITE_TIMEOUT_S = 10.0

log = logging.getLogger(__name__)
AdmitContext = grpc.aio.ServicerContext[scheduler_pb2.AdmitRequest, scheduler_pb2.AdmitResponse]
ReportLoadContext = grpc.aio.ServicerContext[
    scheduler_pb2.ReportLoadRequest, scheduler_pb2.ReportLoadResponse
]

FindRoomContext = grpc.aio.ServicerContext[
    scheduler_pb2.FindRoomRequest, scheduler_pb2.FindRoomResponse
]


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Translates frames into events for the driver, and its commands into frames."""

    def __init__(self, driver: SchedulerDriver) -> None:
        self._driver = driver

    # The generated stub has an async generator, but only explicit writes can time out.
    async def Admit(  # type: ignore[override]
        self, request_iterator: AsyncIterator[scheduler_pb2.AdmitRequest], context: AdmitContext
    ) -> None:
        await context.send_initial_metadata(TAKES_MANY)
        stalled = False
        with self._driver.gateway_stream() as outbox:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(self._read(request_iterator, outbox))
                try:
                    await self._write(outbox, context)
                except TimeoutError:
                    stalled = True
                reading.cancel()
        if stalled or outbox.overflowed:
            log.warning("closing the stream of a gateway that does not read its answers")
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "answers are not read fast enough; reconnect"
            )

    async def ReportLoad(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.ReportLoadRequest],
        context: ReportLoadContext,
    ) -> scheduler_pb2.ReportLoadResponse:
        await accept_stream(context)
        last: LoadReported | None = None
        try:
            async for report in request_iterator:
                try:
                    last = to_load_event(report.load, monotonic_s())
                except InvalidReport as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                self._driver.apply(last)
        finally:
            # A dead worker looks idle while its last report is fresh: invalidate the report at
            # once.
            if last is not None:
                last_report = last.report
                self._driver.apply(
                    LoadLost(monotonic_s(), last_report.worker_id, last_report.incarnation)
                )
        return scheduler_pb2.ReportLoadResponse()

    async def FindRoom(
        self, request: scheduler_pb2.FindRoomRequest, _context: FindRoomContext
    ) -> scheduler_pb2.FindRoomResponse:
        room = self._driver.room(request.model, request.worker_id, request.outage)
        return scheduler_pb2.FindRoomResponse(
            longest_tokens=room.longest_tokens, group_tokens=room.group_tokens
        )

    async def ListRefusals(
        self,
        request: scheduler_pb2.ListRefusalsRequest,
        context: grpc.aio.ServicerContext[
            scheduler_pb2.ListRefusalsRequest, scheduler_pb2.ListRefusalsResponse
        ],
    ) -> scheduler_pb2.ListRefusalsResponse:
        return to_refusals(self._driver.late_refusals())

    async def _read(
        self, request_iterator: AsyncIterator[scheduler_pb2.AdmitRequest], outbox: GatewayOutbox
    ) -> None:
        async for message in request_iterator:
            for frame in unpacked(message):
                self._apply(frame, outbox.stream_id)
        outbox.close()

    def _apply(self, frame: scheduler_pb2.AdmitRequest, stream_id: int) -> None:
        try:
            event = to_admit_event(frame, stream_id, monotonic_s())
        except InvalidReport as error:
            # A worker may have sent the invalid report: keep the gateway's stream.
            log.warning("ignoring an invalid report of a gateway: %s", error)
            return
        if event is None:
            log.warning("ignoring a frame of unknown kind from a gateway")
        else:
            self._driver.apply(event)

    async def _write(self, outbox: GatewayOutbox, context: AdmitContext) -> None:
        """Write frames until the outbox is closed and empty; the stream's only writer.

        Raises:
            TimeoutError: if the gateway does not read a frame in time.
        """
        many = takes_many(context.invocation_metadata())
        heartbeat_s = monotonic_s()
        while not outbox.overflowed:
            if outbox.take_heartbeat_request() or monotonic_s() >= heartbeat_s:
                await _send(context, to_heartbeat(self._driver.current_snapshot()))
                heartbeat_s = monotonic_s() + HEARTBEAT_S
            commands = await outbox.take(max(0.0, heartbeat_s - monotonic_s()))
            frames = [to_frame(command) for command in commands]
            # Older gateways expect a single frame per message.
            for message in packed(frames) if many else frames:
                await _send(context, message)
            if outbox.closed and not commands:
                return


async def _send(context: AdmitContext, frame: scheduler_pb2.AdmitResponse) -> None:
    async with timeout(WRITE_TIMEOUT_S):
        await context.write(frame)
