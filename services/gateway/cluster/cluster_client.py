"""Asks the other services for their state, with short deadlines."""

import asyncio
from typing import Any

import grpc

from services.common.errors import StoreError
from services.common.etcd import Store
from services.common.grpc_client import Dial
from services.common.timeouts import timeout
from services.gateway.cluster import translate
from services.gateway.cluster.cluster_rows import cluster_rows
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.vocabulary.message import ClusterStatus, ProcessState
from tideserve.common.v1 import process_pb2, process_pb2_grpc
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

CALL_TIMEOUT_S = 1.0
# A status page of a large cluster asks this many at a time.
CALLS_AT_ONCE = 64
SILENT = "the memory manager does not answer, so workers and groups are unknown"


class ClusterClient:
    """Tells the state of the whole cluster; a service that is away raises nothing."""

    def __init__(self, view: ClusterView, dial: Dial, store: Store) -> None:
        self._view = view
        self._dial = dial
        self._store = store

    async def cluster(self) -> ClusterStatus | None:
        """Workers' memory and the groups, or None if the memory manager does not answer."""
        address = self._view.address_of("memmgr")
        if address is None:
            return None
        async with self._dial(address, "memmgr") as channel:
            stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
            try:
                answer = await stub.GetCluster(
                    memmgr_pb2.GetClusterRequest(), timeout=CALL_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return None
        return translate.cluster_state(answer)

    async def status(self) -> dict[str, Any]:
        """The object that `tideserve status --json` shows."""
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(self.cluster())
            services = tasks.create_task(self.services())
            etcd = tasks.create_task(self._etcd())
        told = {"services": services.result(), "etcd": etcd.result()}
        told |= {"scheduling": self._view.scheduling}
        return told | self.rows(asked.result())

    async def _etcd(self) -> dict[str, str | None]:
        """Its version, None while it does not answer."""
        try:
            async with timeout(CALL_TIMEOUT_S):
                return {"version": await self._store.version()}
        except (StoreError, TimeoutError):
            return {"version": None}

    def rows(self, cluster: ClusterStatus | None) -> dict[str, Any]:
        """Workers, groups and decisions; None is a memory manager that does not answer."""
        records = {worker.worker_id: worker for worker in self._view.workers()}
        rows = cluster_rows(cluster or ClusterStatus((), ()), records)
        if (fault := self._view.scheduling_fault()) is not None:
            rows |= {"warnings": [fault]}
        return rows if cluster is not None else rows | {"errors": [SILENT]}

    async def services(self) -> list[dict[str, Any]]:
        """A row for each service instance and worker."""
        slots = asyncio.Semaphore(CALLS_AT_ONCE)

        async def row(name: str, role: str, address: str, recorded_pid: int) -> dict[str, Any]:
            async with slots:
                state = await _process(self._dial(address, role))
            if state is None:
                return {"name": name, "pid": recorded_pid, "rss_bytes": 0, "ready": False}
            pid = state.pids[0] if state.pids else recorded_pid
            return {"name": name, "pid": pid, "rss_bytes": state.rss_bytes, "ready": state.ready}

        places = [(r.name, r.name, r.address, r.pid) for r in self._view.instances()]
        places += [(r.worker_id, "worker", r.address, 0) for r in self._view.workers()]
        return list(await asyncio.gather(*(row(*place) for place in places)))


async def _process(channel: grpc.aio.Channel) -> ProcessState | None:
    """What the process at the channel's end tells, or None if it does not answer; closes it."""
    async with channel:
        stub = process_pb2_grpc.ProcessServiceStub(channel)
        try:
            answer = await stub.GetProcess(process_pb2.GetProcessRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    return translate.process_state(answer)
