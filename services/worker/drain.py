"""Graceful shutdown of a worker: it leaves its group, then its requests move or finish.

A worker in a group with others publishes in its etcd record that it drains, so that the memory
manager splits the group, and waits for the split. It also waits for group changes that it has
prepared, then refuses further changes. If no memory manager runs, no split happens, but running
requests may still finish within the drain time. An epoch numbers the configurations of groups.

With `drain: move`, the engine then returns the requests for which other groups have room, which the
scheduler reports (`services/core/planner/drain.py`). Without a scheduler they finish here.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from services.common.clock import monotonic_s
from services.common.membership import Registration
from services.common.timeouts import timeout
from services.core.report import EngineReport
from services.worker.engine_client import EngineClient
from services.worker.group_view import GroupView, Place
from services.worker.member.servicer import MemberServicer
from services.worker.request_returns import RequestReturns
from services.worker.servicer import WorkerServicer
from tideserve.common.v1 import record_pb2

UNUSED_S = 1.0
"""A member of a merged group may leave if it was unused for this long, which is longer than the
interval of the engine's reports."""

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
        returns: RequestReturns,
    ) -> None:
        """`record` is the record in `registration`, shared with others that change it."""
        self._engine = engine
        self._groups = groups
        self._member = member
        self._requests = requests
        self._registration = registration
        self._record = record
        self._returns = returns
        self._progressed = asyncio.Event()

    def note_progress(self) -> None:
        """Check again whether the worker may leave; called at each frame of the engine."""
        self._progressed.set()

    async def leave_group(self, deadline_s: float) -> None:
        """Wait until no other worker needs this worker, but not beyond `deadline_s`.

        Then refuse further group changes.
        """
        if self._is_shared or self._is_needed:
            await self._wait_for_split(deadline_s)
        self._member.refuse_all()

    async def move_requests(self, deadline_s: float) -> None:
        """Return requests until none is active here, but not beyond `deadline_s`."""
        returning = asyncio.create_task(self._returns.run())
        try:
            async with self._published_draining(), timeout(deadline_s - monotonic_s()):
                await self._requests.wait_idle()
        except TimeoutError:
            pass  # `end_requests` logs it
        finally:
            returning.cancel()
            await asyncio.gather(returning, return_exceptions=True)

    async def end_requests(self, deadline_s: float) -> None:
        """Wait until no request is active here, but not beyond `deadline_s`."""
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
        try:
            async with self._published_draining(), timeout(deadline_s - monotonic_s()):
                await self._wait_unused()
        except TimeoutError:
            log.warning("the drain time is over, but the group still needs this worker")

    @contextlib.asynccontextmanager
    async def _published_draining(self) -> AsyncIterator[None]:
        """Publish in etcd that this worker drains; waits for etcd only in the background."""
        self._record.draining = True
        update_task = asyncio.create_task(self._registration.update(self._record))
        try:
            yield
        finally:
            update_task.cancel()
            await asyncio.gather(update_task, return_exceptions=True)

    async def _wait_unused(self) -> None:
        """Wait until the worker is not needed; in a merged group, not needed for `UNUSED_S`."""
        needed_s = monotonic_s()
        # Wait for the next report: the engine may have work that it has not reported yet.
        while self._is_needed or (self._is_shared and monotonic_s() - needed_s < UNUSED_S):
            if self._is_needed:
                needed_s = monotonic_s()
            self._progressed.clear()
            await self._progressed.wait()


def is_needed(report: EngineReport, place: Place | None, active: int) -> bool:
    """Whether requests would be lost if this worker left its group now.

    `report` is the engine's latest, `place` the worker's group in the etcd records, and `active`
    the number of open requests here.
    """
    if place is None:
        return False
    # Until a group change is complete, leaders of other groups fetch sequences and KV from here.
    if report.epoch < place.epoch or report.unsettled:
        return True
    used = report.load.kv_blocks_free < report.load.kv_blocks_total
    return place.shared and (used or active > 0)
