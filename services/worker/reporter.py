"""Reports a worker's load to the scheduler, and its memory to the memory manager.

Reports are sent after changes and periodically; a pause limits their rate, and is longer after
minor changes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from services.common.clock import monotonic_s
from services.common.grpc_client import Dial
from services.common.membership import Directory
from services.common.push import keep_pushing
from services.common.report import load_message, memory_message
from services.common.timeouts import wait_set
from services.core.report import MemoryReport
from services.core.reporting import (
    LoadReporting,
    ReportSchedule,
    ReportUrgency,
    memory_report_urgency,
)
from services.worker.engine_client import EngineClient
from services.worker.ipc import EngineReady
from tideserve.common.v1 import load_pb2, record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

# Seconds between reports: at least, at least after minor changes, at most.
LOAD_PAUSE_S, LOAD_MINOR_PAUSE_S, LOAD_INTERVAL_S = 0.005, 0.25, 0.5
MEMORY_PAUSE_S, MEMORY_MINOR_PAUSE_S, MEMORY_INTERVAL_S = 0.1, 0.5, 1.0


class ReportSender:
    """Sends this worker's reports; retries while scheduler or memory manager are unavailable."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        facts: EngineReady,
        services: Directory[record_pb2.ServiceRecord],
        engine: EngineClient,
        epoch: Callable[[], int],
        pids: Callable[[], list[int]],
        dial: Dial,
    ) -> None:
        """`epoch` returns the epoch at which this worker accepts requests."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._facts = facts
        self._services = services
        self._engine = engine
        self._epoch = epoch
        self._pids = pids
        self._dial = dial
        load_schedule = ReportSchedule(LOAD_PAUSE_S, LOAD_INTERVAL_S, LOAD_MINOR_PAUSE_S)
        self._loads = LoadReporting(worker_id, incarnation, load_schedule)
        self._load_due = _ReportTimer(load_schedule)
        memory_schedule = ReportSchedule(MEMORY_PAUSE_S, MEMORY_INTERVAL_S, MEMORY_MINOR_PAUSE_S)
        self._memory_due = _ReportTimer(memory_schedule)
        self._memory_sent: MemoryReport | None = None
        # Identities of the current streams. gRPC may still read from the generator of an ended
        # stream, and a report that it takes there would be lost.
        self._load_stream = self._memory_stream = object()

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, push in (("scheduler", self._push_load), ("memmgr", self._push_memory)):
                tasks.create_task(keep_pushing(self._services, name, push, self._dial))

    def note_change(self) -> None:
        """Schedule reports if their content has changed."""
        self._load_due.note(self._loads.urgency(self._epoch(), self._engine.report.load))
        self._memory_due.note(memory_report_urgency(self._memory_sent, self._memory()))

    def note_received(self, request_id: str) -> None:
        """Report the arrival of a request, so that the scheduler removes its reservation."""
        self._loads.note_received(request_id)
        self._load_due.note(ReportUrgency.MAJOR)

    def note_evicted(self, thin_hashes: tuple[int, ...]) -> None:
        """Report the hashes of blocks that the engine has evicted from its prefix cache."""
        self._loads.note_evicted(thin_hashes)

    def load_for_gateways(self) -> load_pb2.WorkerLoad:
        """The current load, which gateways forward to the scheduler, in addition to reports."""
        return load_message(self._loads.create_out_of_band(self._epoch(), self._engine.report.load))

    async def load_reports(self) -> AsyncIterator[scheduler_pb2.ReportLoadRequest]:
        """Yield load reports on changes and as heartbeats, until another stream begins."""
        self._loads.force_next()
        stream = self._load_stream = object()
        while stream is self._load_stream:
            now_s = monotonic_s()
            # Send no reports for a hung engine, so that the scheduler assigns it no requests.
            if self._engine.hung or not self._engine.responsive:
                self._loads.force_next()
                self._load_due.schedule.note_sent(now_s)
            elif report := self._loads.create_if_due(
                self._epoch(), self._engine.report.load, now_s
            ):
                yield scheduler_pb2.ReportLoadRequest(load=load_message(report))
            await self._load_due.wait()

    async def memory_reports(self) -> AsyncIterator[memmgr_pb2.ReportMemoryRequest]:
        """Yield memory reports on changes and as heartbeats, until another stream begins."""
        stream = self._memory_stream = object()
        while stream is self._memory_stream:
            self._memory_due.schedule.note_sent(monotonic_s())
            # Do not send the stale numbers of a hung engine; the memory manager detects silence.
            self._memory_sent = report = self._memory() if self._engine.responsive else None
            if report is not None:
                yield memmgr_pb2.ReportMemoryRequest(memory=memory_message(report))
            await self._memory_due.wait()

    async def _push_load(self, channel: grpc.aio.Channel) -> None:
        await scheduler_pb2_grpc.SchedulerServiceStub(channel).ReportLoad(self.load_reports())

    async def _push_memory(self, channel: grpc.aio.Channel) -> None:
        await memmgr_pb2_grpc.MemmgrServiceStub(channel).ReportMemory(self.memory_reports())

    def _memory(self) -> MemoryReport:
        facts = self._facts
        return MemoryReport(
            self._worker_id,
            self._incarnation,
            tuple(self._pids()),
            facts.budget_bytes,
            facts.staging_bytes,
            facts.kv_block_bytes,
            self._engine.report,
            self._engine.hung,
        )


class _ReportTimer:
    """Waits until the next report of a stream is due, by its schedule."""

    def __init__(self, schedule: ReportSchedule) -> None:
        self.schedule = schedule
        self._rescheduled = asyncio.Event()

    def note(self, urgency: ReportUrgency) -> None:
        """Reschedule the next report by the urgency of a change."""
        if self.schedule.note_change(urgency):
            self._rescheduled.set()

    async def wait(self) -> None:
        """Return when the next report is due."""
        while (wait_s := self.schedule.due_s - monotonic_s()) > 0:
            await wait_set(self._rescheduled, wait_s)
