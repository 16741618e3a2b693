"""Registration of a memory manager instance in etcd, by which workers and clients find it.

Workers and clients use the newest registration. It should be the leader's, because the leader
decides from the reports. So a leader whose registration is not the newest registers again. Until a
dead leader's lease ends, no other instance leads, and clients reach a standby.
"""

import asyncio

from services.common.etcd import RETRY_S, Store
from services.common.membership import SERVICES, Directory, Registration
from tideserve.common.v1 import record_pb2

NAME = "memmgr"
PREFIX = f"{SERVICES}{NAME}/"


class Presence:
    """Keeps an instance registered while `run` runs."""

    def __init__(self, store: Store, record: record_pb2.ServiceRecord, ttl_s: int) -> None:
        self._store = store
        self._record = record
        self._ttl_s = ttl_s
        self._leads = False
        self._changed = asyncio.Event()
        self._instances = Directory(
            store, PREFIX, record_pb2.ServiceRecord, on_change=self._changed.set
        )
        self._registration = self._new_registration()

    def set_leader(self, leads: bool) -> None:
        """Set whether the instance is the leader."""
        self._leads = leads
        self._changed.set()

    async def run(self) -> None:
        """Register; register again whenever this leader is not the newest; until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._instances.run())
            while True:
                registering = tasks.create_task(self._registration.run())
                await self._wait_until_outdated()
                registering.cancel()
                await asyncio.wait([registering])
                await self._registration.withdraw()
                # Pause: if another instance still considers itself the leader, it registers again
                # as well, so the two would alternate without delay.
                await asyncio.sleep(RETRY_S)
                self._registration = self._new_registration()

    async def withdraw(self) -> None:
        """Remove the registration; call after `run` was cancelled."""
        await self._registration.withdraw()

    async def _wait_until_outdated(self) -> None:
        """Return once this instance leads and is registered, but another instance is newer."""
        await self._registration.registered.wait()
        while True:
            self._changed.clear()
            newest = self._instances.newest(PREFIX)
            shown = f"{PREFIX}{self._record.incarnation}" in self._instances.records
            if self._leads and shown and newest != self._record:
                return
            await self._changed.wait()

    def _new_registration(self) -> Registration:
        key = f"{PREFIX}{self._record.incarnation}"
        return Registration(self._store, key, self._record, self._ttl_s)
