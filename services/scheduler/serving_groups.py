"""Follows the records of groups, workers and roles in etcd, and reports which groups serve."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from services.common.clock import monotonic_s
from services.common.etcd import Store
from services.common.membership import GROUPS, ROLES, WORKERS, Directory
from services.common.records import scheduling_fault, to_role
from services.core.scheduler.vocabulary import GroupJoined, GroupLeft, ServingGroup
from services.scheduler.translate import to_group
from tideserve.common.v1 import record_pb2

log = logging.getLogger(__name__)


class ServingGroups:
    """Calls `apply` for each group that joins, changes or leaves; keeps groups if etcd is down."""

    def __init__(
        self,
        store: Store,
        apply: Callable[[GroupJoined | GroupLeft], None],
        scheduling: str = "",
        *,
        own_costs: bool = True,
    ) -> None:
        """`scheduling`: this scheduler's policy; workers with another policy are logged.

        `own_costs`: groups have the cost models that their leaders publish.
        """
        self._own_costs = own_costs
        self._apply = apply
        self._scheduling = scheduling
        self._differs = False
        self._groups = Directory(store, GROUPS, record_pb2.GroupRecord, self._refresh)
        self._workers = Directory(store, WORKERS, record_pb2.WorkerRecord, self._refresh)
        self._roles = Directory(store, ROLES, record_pb2.RoleRecord, self._refresh)
        self._serving: dict[str, ServingGroup] = {}

    @property
    def loaded(self) -> bool:
        """Whether the records of groups and workers have been read completely."""
        return self._groups.loaded.is_set() and self._workers.loaded.is_set()

    async def run(self) -> None:
        """Follow etcd until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._groups.run())
            tasks.create_task(self._workers.run())
            tasks.create_task(self._roles.run())

    def _refresh(self) -> None:
        # With a partial list of workers, groups would seem to lack members.
        if not self.loaded:
            return
        self._check_scheduling()
        workers = {record.worker_id: record for record in self._workers.records.values()}
        # Advice: groups serve before the roles are read.
        roles = {
            record.worker_id: role
            for record in self._roles.records.values()
            if (role := to_role(record)) is not None
        }
        serving: dict[str, ServingGroup] = {}
        for record in self._groups.records.values():
            group = to_group(record, workers, roles)
            if group is not None:
                costs = group.cost_model if self._own_costs else None
                serving[group.group_id] = replace(group, cost_model=costs)
        now_s = monotonic_s()
        for group_id in self._serving.keys() - serving.keys():
            log.info("%s left", group_id)
            self._apply(GroupLeft(now_s, group_id))
        for group_id, group in serving.items():
            known = self._serving.get(group_id)
            if group != known:
                if known is None or group.epoch != known.epoch:
                    log.info("%s serves %s at epoch %d", group_id, group.model, group.epoch)
                self._apply(GroupJoined(now_s, group))
        self._serving = serving

    def _check_scheduling(self) -> None:
        """Warn about workers with another scheduling policy, once until all agree again."""
        fault = scheduling_fault(self._scheduling, self._workers.records.values())
        if fault is not None and not self._differs:
            log.warning("%s", fault)
        self._differs = fault is not None
