"""How a worker leaves: first the others learn to do without it, then its own requests end.

A worker in a group of several asks to be taken out, by its registration, and waits for the split.
Without a memory manager no split comes; requests that run now may end meanwhile. A change that the
worker agreed to is waited for as well. Afterwards it agrees to no change.
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
"""A member that was unused for so long may leave; longer than an engine's heartbeat."""

log = logging.getLogger(__name__)


class WorkerDrain:
    """Waits until a worker may go."""

    def __init__(
        self,
        engine: EngineClient,
        groups: GroupView,
        member: MemberServicer,
        requests: WorkerServicer,
        registration: Registration,
        record: record_pb2.WorkerRecord,
    ) -> None:
        """`record` is what `registration` says until the worker leaves."""
        self._engine = engine
        self._groups = groups
        self._member = member
        self._requests = requests
        self._registration = registration
        self._record = record
        self._progressed = asyncio.Event()

    def note_progress(self) -> None:
        """The engine has spoken, which it does several times a second."""
        self._progressed.set()

    async def leave_group(self, deadline_s: float) -> None:
        """Return when no other worker needs this one, at `deadline_s` at the latest."""
        if self._is_shared or self._is_needed:
            await self._wait_for_split(deadline_s)
        self._member.refuse_all()

    async def end_requests(self, deadline_s: float) -> None:
        """Return when no request runs, at `deadline_s` at the latest."""
        try:
            async with timeout(deadline_s - monotonic_s()):
                await self._requests.wait_idle()
        except TimeoutError:
            log.warning("%d requests are cut off by the drain time", self._requests.active)

    @property
    def _is_shared(self) -> bool:
        return self._groups.place is not None and self._groups.place.shared

    @property
    def _is_needed(self) -> bool:
        preparing, active = self._member.preparing, self._requests.active
        return preparing or is_needed(self._engine.report, self._groups.place, active)

    async def _wait_for_split(self, deadline_s: float) -> None:
        log.info("asks to be taken out of its group")
        leaving = record_pb2.WorkerRecord()
        leaving.CopyFrom(self._record)
        leaving.draining = True
        asking = asyncio.create_task(self._registration.update(leaving))
        try:
            async with timeout(deadline_s - monotonic_s()):
                await self._unused()
        except TimeoutError:
            log.warning("requests of other workers need this worker still")
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    async def _unused(self) -> None:
        """Return when it is not needed; in a group of several when it was not for a while."""
        needed_s = monotonic_s()
        # The engine tells within a heartbeat what it has not told yet.
        while self._is_needed or (self._is_shared and monotonic_s() - needed_s < UNUSED_S):
            if self._is_needed:
                needed_s = monotonic_s()
            self._progressed.clear()
            await self._progressed.wait()


def is_needed(report: EngineReport, place: Place | None, active: int) -> bool:
    """Whether requests of other workers would be lost without this one, as far as is known.

    `place` is the worker's by the records; `active` requests of gateways are open here.
    """
    if place is None:
        return False
    # Until the change is over, other leaders get sequences and KV from here.
    if report.epoch < place.epoch or report.unsettled:
        return True
    used = report.load.kv_blocks_free < report.load.kv_blocks_total
    return place.shared and (used or active > 0)
