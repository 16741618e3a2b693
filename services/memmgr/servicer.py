"""The memory manager's gRPC service, MemmgrService, for workers, schedulers and operators."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from services.common.clock import monotonic_s
from services.common.grpc_server import accept_stream
from services.common.report import InvalidReport, to_memory_report
from services.common.timeouts import timeout
from services.core.groups.coordinator import ChangePhase
from services.core.overload.action_plan import Change
from services.core.overload.events import Action, Cause
from services.core.overload.manual_change import InvalidChange, merge_of, split_of
from services.core.overload.shipping_pair import pair_of
from services.memmgr.change_trace import manual_cause
from services.memmgr.demand_view import DemandView
from services.memmgr.driver import Driver
from services.memmgr.member_client import ShippingFailed
from services.memmgr.overload_watch import OverloadWatch
from services.memmgr.shipper import Shipper
from services.memmgr.translate import (
    to_demands,
    to_get_cluster,
    to_list_groups,
    to_shortfalls,
    to_step,
)
from services.memmgr.worker_memory import MemoryView
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

# Maximum interval between messages of a shortfall stream.
REPEAT_S = 1.0


class MemmgrServicer(memmgr_pb2_grpc.MemmgrServiceServicer):
    """Receives reports of memory and demand, and serves queries and manual changes."""

    def __init__(
        self,
        driver: Driver,
        memory: MemoryView,
        demand: DemandView,
        watch: OverloadWatch,
        shipper: Shipper,
    ) -> None:
        self._driver = driver
        self._memory = memory
        self._demand = demand
        self._watch = watch
        self._shipper = shipper

    async def ReportMemory(
        self,
        request_iterator: AsyncIterator[memmgr_pb2.ReportMemoryRequest],
        context: Context,
    ) -> memmgr_pb2.ReportMemoryResponse:
        await accept_stream(context)
        async for report in request_iterator:
            try:
                memory = to_memory_report(report.memory)
            except InvalidReport as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            self._driver.note_report(memory)
        return memmgr_pb2.ReportMemoryResponse()

    async def ReportDemand(
        self,
        request_iterator: AsyncIterator[memmgr_pb2.ReportDemandRequest],
        context: Context,
    ) -> memmgr_pb2.ReportDemandResponse:
        await accept_stream(context)
        with self._demand.stream() as stream:
            async for report in request_iterator:
                try:
                    demands = to_demands(report)
                except InvalidReport as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                stream.report(demands)
        return memmgr_pb2.ReportDemandResponse()

    async def WatchShortfalls(
        self, request: memmgr_pb2.WatchShortfallsRequest, context: Context
    ) -> AsyncIterator[memmgr_pb2.WatchShortfallsResponse]:
        while True:
            # Take the event first, so that a change during the yield is not missed.
            changed, shortfalls = self._watch.shortfalls_changed, self._watch.shortfalls
            yield memmgr_pb2.WatchShortfallsResponse(shortfalls=to_shortfalls(shortfalls))
            with contextlib.suppress(TimeoutError):
                async with timeout(REPEAT_S):
                    await changed.wait()

    async def ListGroups(
        self, request: memmgr_pb2.ListGroupsRequest, context: Context
    ) -> memmgr_pb2.ListGroupsResponse:
        return to_list_groups(self._driver.stable_groups)

    async def GetCluster(
        self, request: memmgr_pb2.GetClusterRequest, context: Context
    ) -> memmgr_pb2.GetClusterResponse:
        watch = self._watch
        return to_get_cluster(
            self._memory.workers(),
            self._driver.groups,
            watch.decisions,
            watch.shortfalls,
            self._driver.losses,
            watch.split_obstacles,
        )

    async def MergeGroups(
        self, request: memmgr_pb2.MergeGroupsRequest, context: Context
    ) -> AsyncIterator[memmgr_pb2.MergeGroupsResponse]:
        def change() -> Change:
            return merge_of(self._driver.stable_groups, request.group_ids, self._driver.facts)

        async for step in self._steps(Action.MERGE, change, context):
            yield memmgr_pb2.MergeGroupsResponse(step=step)

    async def SplitGroup(
        self, request: memmgr_pb2.SplitGroupRequest, context: Context
    ) -> AsyncIterator[memmgr_pb2.SplitGroupResponse]:
        def change() -> Change:
            driver = self._driver
            group_id, parts = request.group_id or None, request.parts or None
            return split_of(driver.stable_groups, group_id, driver.facts, parts)

        async for step in self._steps(Action.SPLIT, change, context):
            yield memmgr_pb2.SplitGroupResponse(step=step)

    async def MoveRequests(
        self, request: memmgr_pb2.MoveRequestsRequest, context: Context
    ) -> memmgr_pb2.MoveRequestsResponse:
        driver = self._driver
        await self._check_leads(context)
        try:
            pair = pair_of(
                driver.stable_groups,
                driver.facts,
                self._memory.fresh(monotonic_s()),
                request.source_worker_id,
                request.target_worker_id,
            )
        except InvalidChange as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        try:
            shipped = await self._shipper.ship(pair, max(0, request.requests_max), Cause.MANUAL)
        except ShippingFailed as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        return memmgr_pb2.MoveRequestsResponse(
            target_worker_id=pair.target.members[0].worker_id,
            moved=shipped.moved,
            kept=shipped.kept,
            reason=shipped.reason,
        )

    async def _check_leads(self, context: Context) -> None:
        if not self._driver.leads:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "this memory manager is a standby; send the request to the leader",
            )

    async def _steps(
        self, action: Action, find: Callable[[], Change], context: Context
    ) -> AsyncIterator[memmgr_pb2.ReconfigurationStep]:
        """Execute the change that `find` returns; its commit is reported to the monitor."""
        await self._check_leads(context)
        try:
            change = find()
        except InvalidChange as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        model = self._driver.groups_of(change.targets)[0].model
        logged = None
        async for step in self._driver.reconfigure(
            change.targets, manual_cause(action, change), urgent=True
        ):
            shown = step
            if step.phase is ChangePhase.PREPARING:
                shown = replace(step, message=f"{change.text}; {step.message}")
            if step.phase is ChangePhase.COMMITTED:
                logged = self._watch.note_manual_change(model, action, change)
            if logged is not None:
                logged.note(model, f"{step.phase}, {step.message}")
            yield to_step(shown)
