"""Queries the memory manager and all services for the admin page and `tideserve status`.

Deadlines are short. A service that does not respond raises no error; its row says so.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

import grpc

from services.common.errors import StoreError
from services.common.etcd import Store
from services.common.grpc_client import Dial
from services.common.report import memory_values
from services.common.timeouts import timeout
from services.core.groups.vocabulary import Group, GroupPhase
from services.core.report import MemoryReport
from services.core.role import Role
from services.gateway.cluster import translate
from services.gateway.cluster.cluster_view import ClusterView
from services.gateway.vocabulary.message import ClusterStatus, ProcessState
from tideserve.common.v1 import process_pb2, process_pb2_grpc, record_pb2
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc
from tideserve.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

NO_ROLES: Mapping[str, Role] = {}


def cluster_rows(
    cluster: ClusterStatus,
    records: Mapping[str, record_pb2.WorkerRecord],
    roles: Mapping[str, Role] = NO_ROLES,
) -> dict[str, Any]:
    """The part of a status that describes the cluster: workers, groups, decisions and losses.

    `records` (the workers' registrations) and `roles` are by worker id.
    """
    layers_by_worker = {
        member.worker_id: member.end_layer - member.first_layer
        for group in cluster.groups
        if _has_layers(group)
        for member in group.members
    }
    return {
        "workers": [
            _worker(worker, records.get(worker.worker_id), layers_by_worker.get(worker.worker_id))
            | {"role": roles.get(worker.worker_id, Role.MIXED).value}
            for worker in cluster.workers
        ],
        "groups": [_group(group) for group in cluster.groups],
        "decisions": list(cluster.decisions),
        "shortfalls": [
            {"model": model, "tokens": tokens} for model, tokens in cluster.shortfalls.items()
        ],
        "losses": list(cluster.losses),
        "split_obstacles": cluster.split_obstacles,
    }


def _worker(
    worker: MemoryReport, record: record_pb2.WorkerRecord | None, layers: int | None
) -> dict[str, Any]:
    """The status row of a worker; `layers`: number of layers that it runs, None for all."""
    load, block_bytes = worker.engine.load, worker.kv_block_bytes
    # On a worker that runs only some layers, a block holds the KV of these layers.
    if layers is not None and record is not None and record.shape.num_layers:
        block_bytes = block_bytes * layers // record.shape.num_layers
    values = memory_values(worker)
    adapters = [
        {"digest": f"{adapter.digest:016x}", "loading": adapter.loading, "running": adapter.running}
        for adapter in load.adapter_use.adapters
    ]
    return {
        "id": values.pop("worker_id"),
        **values,
        "adapters": adapters,
        "kv_used_bytes": (load.kv_blocks_total - load.kv_blocks_free) * block_bytes,
        "kv_free_bytes": load.kv_blocks_free * block_bytes,
    } | translate.worker_facts(record)


def _has_layers(group: Group) -> bool:
    """Whether the group's record has the layer ranges of its members."""
    return all(member.end_layer > member.first_layer for member in group.members)


def _group(group: Group) -> dict[str, Any]:
    layers = [[member.first_layer, member.end_layer] for member in group.members]
    return {
        "id": group.group_id,
        "epoch": group.epoch,
        "model": group.model,
        "members": [member.worker_id for member in group.members],
        "layers": layers if _has_layers(group) else [],
        "changing": bool(group.attempt),
        "degraded": group.phase is GroupPhase.DEGRADED,
    }


CALL_TIMEOUT_S = 1.0
# Maximum concurrent calls for the status of a large cluster.
CALLS_AT_ONCE = 64
NO_MEMMGR = "the memory manager does not respond, so workers and groups are unknown"


class ClusterClient:
    """Returns the state of the cluster, without what services that do not respond would report."""

    def __init__(self, view: ClusterView, dial: Dial, store: Store) -> None:
        self._view = view
        self._dial = dial
        self._store = store

    async def cluster(self) -> ClusterStatus | None:
        """The cluster's state from the memory manager; None if it does not respond."""
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
            cluster = tasks.create_task(self.cluster())
            services = tasks.create_task(self.services())
            etcd = tasks.create_task(self._etcd())
            refusals = tasks.create_task(self._late_refusals())
        status = {"services": services.result(), "etcd": etcd.result()}
        status |= {"late_refusals": refusals.result()}
        status |= {"scheduling": self._view.scheduling}
        return status | self.rows(cluster.result())

    async def _late_refusals(self) -> list[dict[str, Any]]:
        """The scheduler's latest refusals for lateness; none if it does not answer."""
        address = self._view.address_of("scheduler")
        if address is None:
            return []
        async with self._dial(address, "scheduler") as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            try:
                answer = await stub.ListRefusals(
                    scheduler_pb2.ListRefusalsRequest(), timeout=CALL_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return []
        return translate.late_refusals(answer)

    async def _etcd(self) -> dict[str, Any]:
        """etcd's version, None while it does not respond, and its alarms, if any."""
        try:
            async with timeout(CALL_TIMEOUT_S):
                status = await self._store.status()
        except (StoreError, TimeoutError):
            return {"version": None}
        return {"version": status.version} | ({"alarms": status.alarms} if status.alarms else {})

    def rows(self, cluster: ClusterStatus | None) -> dict[str, Any]:
        """The lists of `cluster_rows`, with warnings and errors.

        `cluster` is None if the memory manager did not respond.
        """
        records = {worker.worker_id: worker for worker in self._view.workers()}
        rows = cluster_rows(cluster or ClusterStatus((), ()), records, self._view.roles())
        if (fault := self._view.scheduling_fault()) is not None:
            rows |= {"warnings": [fault]}
        return rows if cluster is not None else rows | {"errors": [NO_MEMMGR]}

    async def services(self) -> list[dict[str, Any]]:
        """A status row for each service instance and worker."""
        slots = asyncio.Semaphore(CALLS_AT_ONCE)

        async def row(name: str, role: str, address: str, recorded_pid: int) -> dict[str, Any]:
            async with slots:
                state = await _process(self._dial(address, role))
            # A process that does not respond still has a row, with its registered pid (0: a
            # worker).
            if state is None:
                return {"name": name, "pid": recorded_pid, "rss_bytes": 0, "ready": False}
            pid = state.pids[0] if state.pids else recorded_pid
            return {"name": name, "pid": pid, "rss_bytes": state.rss_bytes, "ready": state.ready}

        processes = [(r.name, r.name, r.address, r.pid) for r in self._view.instances()]
        processes += [(r.worker_id, "worker", r.address, 0) for r in self._view.workers()]
        return list(await asyncio.gather(*(row(*process) for process in processes)))


async def _process(channel: grpc.aio.Channel) -> ProcessState | None:
    """The state of the process behind `channel`, None without a reply; closes the channel."""
    async with channel:
        stub = process_pb2_grpc.ProcessServiceStub(channel)
        try:
            answer = await stub.GetProcess(process_pb2.GetProcessRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    return translate.process_state(answer)
