"""Pushes load to the scheduler and memory to the memory manager, on change and as a heartbeat."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from services.common.grpc_client import Dial
from services.common.membership import Directory
from services.common.push import keep_pushing, wait_set
from services.common.report import load_message, memory_message
from services.core.report import LoadReport, MemoryReport
from services.worker.engine_client import EngineClient
from services.worker.ipc import EngineReady
from tideserve.common.v1 import load_pb2, record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

LOAD_INTERVAL_S = 0.5
MEMORY_INTERVAL_S = 1.0
# Changes within this time after a report travel in the next one.
LOAD_PAUSE_S = 0.005
MEMORY_PAUSE_S = 0.1
RECEIVED_IDS_MAX = 10_000


class Reporter:
    """Reports of this worker to the control plane. The loss of that never stops the worker."""

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
        """`epoch` is the epoch under which requests find this worker."""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._facts = facts
        self._services = services
        self._engine = engine
        self._epoch = epoch
        self._pids = pids
        self._dial = dial
        self._loads_told = 0
        self._received: list[str] = []
        self._reported: list[str] = []  # new in the last report; repeated in the next
        self._load_changed = asyncio.Event()
        self._memory_changed = asyncio.Event()

    async def run(self) -> None:
        """Report until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name, push in (("scheduler", self._push_load), ("memmgr", self._push_memory)):
                tasks.create_task(keep_pushing(self._services, name, push, self._dial))

    def note_change(self) -> None:
        """Something that is reported has changed."""
        self._load_changed.set()
        self._memory_changed.set()

    def note_received(self, request_id: str) -> None:
        """A request has arrived, so its reservation at the scheduler can go."""
        if len(self._received) < RECEIVED_IDS_MAX:
            self._received.append(request_id)
        self._load_changed.set()

    async def _push_load(self, channel: grpc.aio.Channel) -> None:
        await scheduler_pb2_grpc.SchedulerServiceStub(channel).ReportLoad(self.load_reports())

    async def load_reports(self) -> AsyncIterator[scheduler_pb2.ReportLoadRequest]:
        """The load now, at every change and as a heartbeat, without end."""
        while True:
            # For a frozen engine no reports are sent, so the scheduler sends it nothing more.
            if self._engine.responsive:
                report = scheduler_pb2.ReportLoadRequest(load=self.load_now())
                self._reported, self._received = self._received, []
                yield report
            # In this order a change after a pause is reported at once.
            await asyncio.sleep(LOAD_PAUSE_S)
            await wait_set(self._load_changed, LOAD_INTERVAL_S)

    async def _push_memory(self, channel: grpc.aio.Channel) -> None:
        async def reports() -> AsyncIterator[memmgr_pb2.ReportMemoryRequest]:
            while True:
                # Numbers of a frozen engine mean nothing; the memory manager notices the silence.
                if self._engine.responsive:
                    yield memmgr_pb2.ReportMemoryRequest(memory=self._memory_now())
                await asyncio.sleep(MEMORY_PAUSE_S)
                await wait_set(self._memory_changed, MEMORY_INTERVAL_S)

        await memmgr_pb2_grpc.MemmgrServiceStub(channel).ReportMemory(reports())

    def load_now(self) -> load_pb2.WorkerLoad:
        """The load at this moment, with a higher number than any report before."""
        self._loads_told += 1
        received = (*self._reported, *self._received)
        told = self._engine.report.load
        return load_message(
            LoadReport(
                self._worker_id, self._incarnation, self._loads_told, self._epoch(), told, received
            )
        )

    def _memory_now(self) -> memmgr_pb2.WorkerMemory:
        facts = self._facts
        return memory_message(
            MemoryReport(
                self._worker_id,
                self._incarnation,
                tuple(self._pids()),
                facts.budget_bytes,
                facts.staging_bytes,
                facts.kv_block_bytes,
                self._engine.report,
            )
        )
