"""Assigns roles to workers and writes them to etcd, while this memory manager leads.

`RoleAssigner` decides; schedulers read the records. A worker without a record is mixed.
"""

import asyncio
import logging
from collections.abc import Mapping

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.core.overload.group_use import group_uses
from services.core.overload.roles import RoleAssigner, RolesDue, RoleSetting
from services.core.role import Role
from services.memmgr.demand_view import DemandView
from services.memmgr.driver import Driver
from services.memmgr.overload_watch import OverloadWatch
from services.memmgr.worker_memory import MemoryView

INTERVAL_S = 0.5
"""Interval at which roles are decided."""
WRITES_MAX = 100
"""Maximum number of records that are written at once."""

log = logging.getLogger(__name__)


class RoleWriter:
    """Writes the roles of all workers while `run` runs."""

    def __init__(
        self,
        driver: Driver,
        memory: MemoryView,
        demand: DemandView,
        watch: OverloadWatch,
        roles: str,
    ) -> None:
        """`roles` is the setting. Raises ValueError if it is invalid."""
        self._driver = driver
        self._memory = memory
        self._demand = demand
        self._watch = watch
        self._assigner = RoleAssigner(RoleSetting.parse(roles))

    async def run(self) -> None:
        """Decide and write, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if not (self._driver.leads and self._driver.loaded):
                continue
            present = self._driver.roles
            roles = self._wanted(present)
            changes: dict[str, Role] = {
                worker_id: roles.get(worker_id, Role.MIXED)
                for worker_id in sorted(roles.keys() | present.keys())
                if roles.get(worker_id) is not present.get(worker_id)
            }
            names = list(changes)
            for first in range(0, len(names), WRITES_MAX):
                part = names[first : first + WRITES_MAX]
                await self._write({worker_id: changes[worker_id] for worker_id in part})

    def _wanted(self, present: Mapping[str, Role]) -> dict[str, Role]:
        driver, now_s = self._driver, monotonic_s()
        uses = group_uses(driver.stable_groups, self._memory.engines(now_s), driver.facts)
        loads = {use.model: self._watch.load(use.model) for use in uses}
        demands = {demand.model: demand for demand in self._demand.demands()}
        return self._assigner.assign(RolesDue(now_s, uses, driver.facts, loads, demands, present))

    async def _write(self, roles: Mapping[str, Role]) -> None:
        # After a failure the next round compares with the records again.
        try:
            written = await self._driver.write_roles(roles)
        except StoreError as error:
            log.warning("cannot write the roles of workers, retrying: %s", error)
            return
        if written:
            text = ", ".join(f"{worker_id} {role}" for worker_id, role in roles.items())
            log.info("roles: %s", text)
