"""A live view of the cluster's services, workers and groups, as registered in etcd.

A *group* is a set of workers that runs a copy of the model together; a merged group has several
members, each with a part of the layers. A group is *stable* if it is formed and not changing.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.common.etcd import Store
from services.common.membership import GROUPS, ROLES, SERVICES, WORKERS, Directory
from services.common.records import engine_of, scheduling_fault, to_group, to_role
from services.core.engine_kind import EngineKind
from services.core.groups.vocabulary import Group, GroupPhase
from services.core.role import Role
from tideserve.common.v1 import record_pb2


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Sizes that the workers of a model report, as last seen; 0 before the first worker.

    `max_model_len`: longest sequence in tokens of any worker; `block_size`: tokens per KV block.
    """

    max_model_len: int = 0
    block_size: int = 0


NO_SIZES = ModelSizes()


class ClusterView:
    """Follows the etcd records of services, workers and groups of all models."""

    def __init__(self, store: Store, on_change: Callable[[], None]) -> None:
        self._sizes: dict[str, ModelSizes] = {}
        self._services = Directory(store, SERVICES, record_pb2.ServiceRecord, on_change)
        self._workers = Directory(store, WORKERS, record_pb2.WorkerRecord, self._note_workers)
        self._groups = Directory(store, GROUPS, record_pb2.GroupRecord)
        self._roles = Directory(store, ROLES, record_pb2.RoleRecord)
        self._on_change = on_change

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for directory in self._directories:
                tasks.create_task(directory.run())

    async def loaded(self) -> None:
        """Return once all records have been read for the first time."""
        for directory in self._directories:
            await directory.loaded.wait()

    def address_of(self, service: str) -> str | None:
        """host:port of the newest instance of a service."""
        record = self._services.newest(f"{SERVICES}{service}/")
        return record.address if record is not None else None

    def instances(self) -> list[record_pb2.ServiceRecord]:
        """The newest instance of each service and all instances of gateways, sorted by name."""
        chosen = []
        for key, record in sorted(self._services.records.items()):
            newest = self._services.newest(f"{SERVICES}{record.name}/")
            if record.name == "gateway" or record is newest or newest is None:
                chosen.append(self._services.records[key])
        return chosen

    def workers(self) -> list[record_pb2.WorkerRecord]:
        """The registered workers, sorted by id."""
        return sorted(self._workers.records.values(), key=lambda record: record.worker_id)

    def roles(self) -> dict[str, Role]:
        """The roles of workers, by worker id; a worker without an entry is mixed."""
        known = {record.worker_id: to_role(record) for record in self._roles.records.values()}
        return {name: role for name, role in known.items() if role is not None}

    @property
    def scheduling(self) -> str:
        """The scheduler's `scheduling` option; "" while no scheduler is known."""
        scheduler = self._services.newest(f"{SERVICES}scheduler/")
        return scheduler.scheduling if scheduler is not None else ""

    def scheduling_fault(self) -> str | None:
        """An error text if workers have another `scheduling` option than the scheduler."""
        return scheduling_fault(self.scheduling, self.workers())

    def worker_addresses(self) -> frozenset[str]:
        """Addresses (host:port) of the registered workers."""
        return frozenset(record.address for record in self._workers.records.values())

    def loads_adapters(self, address: str) -> bool:
        """Whether the worker at an address loads adapters."""
        # Check all: the record of a worker that had this address before may still exist.
        slots = [w.adapters.slots for w in self._workers.records.values() if w.address == address]
        return bool(slots) and min(slots) > 0

    def adapter_rank_max(self, model: str) -> int:
        """Largest rank of an adapter that a worker of a model loads; 0 if none loads adapters."""
        limits = [worker.adapters for worker in self.workers_of(model)]
        return max((limit.rank_max for limit in limits if limit.slots > 0), default=0)

    def of(self, model: str) -> "ModelView":
        """The view of a model's workers and groups."""
        self._sizes.setdefault(model, NO_SIZES)
        return ModelView(self, model)

    def sizes_of(self, model: str) -> ModelSizes:
        """Sizes of the workers of a model, as last seen; the model must have a view."""
        return self._sizes[model]

    @property
    def _directories(self) -> tuple[Directory[Any], ...]:
        return (self._services, self._workers, self._groups, self._roles)

    def stable_groups(self) -> list[Group]:
        """The stable groups of all models."""
        groups = map(to_group, self._groups.records.values())
        return [group for group in groups if group is not None and group.phase is GroupPhase.STABLE]

    def workers_of(self, model: str) -> list[record_pb2.WorkerRecord]:
        """The registered workers of a model."""
        return [w for w in self._workers.records.values() if w.model == model]

    def _note_workers(self) -> None:
        for model, last in self._sizes.items():
            workers = self.workers_of(model)
            # Keep the last known values while no worker is registered.
            self._sizes[model] = ModelSizes(
                max((w.max_model_len for w in workers), default=0) or last.max_model_len,
                max((w.block_size for w in workers), default=0) or last.block_size,
            )
        self._on_change()


class ModelView:
    """A live view of the workers and groups of a model."""

    def __init__(self, cluster: ClusterView, model: str) -> None:
        self.model = model
        self._cluster = cluster

    @property
    def max_model_len(self) -> int | None:
        """Longest sequence in tokens of any worker, as last seen; None before the first worker."""
        return self._cluster.sizes_of(self.model).max_model_len or None

    @property
    def block_size(self) -> int:
        """Tokens per KV block of the workers, as last seen; 0 before the first worker."""
        return self._cluster.sizes_of(self.model).block_size

    def serving_workers(self) -> int:
        """Number of registered workers that are members of a stable group."""
        # Compare incarnations (ids of a process run): a restarted worker must join a new group.
        members = {
            (member.worker_id, member.incarnation)
            for group in self._cluster.stable_groups()
            for member in group.members
        }
        return sum((w.worker_id, w.incarnation) in members for w in self._workers())

    def serving_groups(self) -> int:
        """Number of stable groups; merged workers count as a single group."""
        return sum(group.model == self.model for group in self._cluster.stable_groups())

    def registered_workers(self) -> int:
        """Number of registered workers."""
        return len(self._workers())

    def without_drops(self) -> dict[str, str]:
        """Why workers cannot drop layers, by worker id."""
        return {w.worker_id: w.no_drops for w in self._workers() if w.no_drops}

    def resumes_grammars(self) -> bool:
        """Whether all workers can resume an output in the middle of a grammar."""
        return all(engine_of(worker) == EngineKind.TIDESERVE for worker in self._workers())

    def _workers(self) -> list[record_pb2.WorkerRecord]:
        return self._cluster.workers_of(self.model)
