"""Graceful shutdown of a worker: leave its group first, then let its own requests finish.

A member of a merged group requests a split by registering as draining, and waits for it. It also
waits for a group change that it has prepared, then refuses further changes. Without a memory
manager no split happens, but running requests may still finish within the drain time.
"""

import asyncio
import logging

from services.common.clock import monotonic_s
from services.common.membership import Registration
from services.common.timeouts import timeout
from services.core.report import EngineReport
from services.worker.engine_client import EngineClient
from services.worker.group_view import GroupView, Place
from services.worker.member.servicer import MemberServicer
from services.worker.servicer import WorkerServicer
from tideserve.common.v1 import record_pb2

UNUSED_S = 1.0
"""A member may leave once it was unused for this long; longer than the heartbeat interval."""

log = logging.getLogger(__name__)


class WorkerDrain:
    """Waits until a worker may shut down."""

    def __init__(
        self,
        engine: EngineClient,
        groups: GroupView,
        member: MemberServicer,
        requests: WorkerServicer,
        registration: Registration,
        record: record_pb2.WorkerRecord,
    ) -> None:
        """`record` is the record in `registration` before the worker drains."""
        self._engine = engine
        self._groups = groups
        self._member = member
        self._requests = requests
        self._registration = registration
        self._record = record
        self._progressed = asyncio.Event()

    def note_progress(self) -> None:
        """Note a frame of the engine, which sends several per second."""
        self._progressed.set()

    async def leave_group(self, deadline_s: float) -> None:
        """Return when no other worker needs this worker, at `deadline_s` at the latest."""
        if self._is_shared or self._is_needed:
            await self._wait_for_split(deadline_s)
        self._member.refuse_all()

    async def end_requests(self, deadline_s: float) -> None:
        """Return when no request runs here, at `deadline_s` at the latest."""
        try:
            async with timeout(deadline_s - monotonic_s()):
                await self._requests.wait_idle()
        except TimeoutError:
            log.warning(
                "%d requests are cut off at the end of the drain time", self._requests.active
            )

    @property
    def _is_shared(self) -> bool:
        return self._groups.place is not None and self._groups.place.shared

    @property
    def _is_needed(self) -> bool:
        preparing, active = self._member.preparing, self._requests.active
        return preparing or is_needed(self._engine.report, self._groups.place, active)

    async def _wait_for_split(self, deadline_s: float) -> None:
        log.info("draining: requesting removal from the group")
        leaving = record_pb2.WorkerRecord()
        leaving.CopyFrom(self._record)
        leaving.draining = True
        asking = asyncio.create_task(self._registration.update(leaving))
        try:
            async with timeout(deadline_s - monotonic_s()):
                await self._unused()
        except TimeoutError:
            log.warning("drain time is over, but requests of other workers still need this worker")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _unused(self) -> None:
        """Return when the worker is not needed; in a merged group, not for `UNUSED_S`."""
        needed_s = monotonic_s()
        # The wait covers work that the engine reports only with its next heartbeat.
        while self._is_needed or (self._is_shared and monotonic_s() - needed_s < UNUSED_S):
            if self._is_needed:
                needed_s = monotonic_s()
            self._progressed.clear()
            await self._progressed.wait()


def is_needed(report: EngineReport, place: Place | None, active: int) -> bool:
    """Whether requests would be lost if this worker left now, as far as it knows.

    `place` is the worker's group in the records; `active` is the number of open requests here.
    """
    if place is None:
        return False
    # Until a group change is over, other leaders fetch sequences and KV from this worker.
    if report.epoch < place.epoch or report.unsettled:
        return True
    used = report.load.kv_blocks_free < report.load.kv_blocks_total
    return place.shared and (used or active > 0)
