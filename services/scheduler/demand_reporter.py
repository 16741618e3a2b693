"""Streams the KV demand of the scheduler's queue to the memory manager."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc.aio

from services.common.clock import monotonic_s
from services.common.grpc_client import Dial
from services.common.membership import Directory
from services.common.push import keep_pushing
from services.common.timeouts import wait_set
from services.core.demand import ModelDemand, is_urgent_change
from services.scheduler.translate import to_demand_report
from tideserve.common.v1 import record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

INTERVAL_S = 1.0
# Changes within this time are sent in the same report.
PAUSE_S = 0.05


class DemandReporter:
    """Streams the queue's demand to the memory manager registered in etcd, if any."""

    def __init__(
        self,
        services: Directory[record_pb2.ServiceRecord],
        demands: Callable[[], tuple[ModelDemand, ...]],
        changed: asyncio.Event,
        dial: Dial,
    ) -> None:
        """`changed` is set whenever the result of `demands` may have changed."""
        self._services = services
        self._demands = demands
        self._changed = changed
        self._dial = dial

    async def run(self) -> None:
        """Report until cancelled."""
        await keep_pushing(self._services, "memmgr", self._push, self._dial)

    async def _push(self, channel: grpc.aio.Channel) -> None:
        await memmgr_pb2_grpc.MemmgrServiceStub(channel).ReportDemand(self.reports())

    async def reports(self) -> AsyncIterator[memmgr_pb2.ReportDemandRequest]:
        """Yield the demand now, at each urgent change, and every `INTERVAL_S`; never ends."""
        due_s, reported = 0.0, tuple[ModelDemand, ...]()
        while True:
            demands, now_s = self._demands(), monotonic_s()
            if now_s >= due_s or is_urgent_change(reported, demands):
                yield to_demand_report(demands)
                due_s, reported = monotonic_s() + INTERVAL_S, demands
            await wait_set(self._changed, due_s - monotonic_s())
            # Batch the changes of a burst of requests into a single report.
            await asyncio.sleep(PAUSE_S)
