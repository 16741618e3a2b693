"""How an instance shows in etcd: as "memmgr" while it leads, else as "memmgr-standby".

So whoever looks for the memory manager finds the one that decides, and its standbys, too.
"""

import asyncio

from services.common.etcd import Store
from services.common.membership import SERVICES, Registration
from tideserve.common.v1 import record_pb2

NAME = "memmgr"
STANDBY = "memmgr-standby"


class Presence:
    """Registers an instance under the name that fits, for as long as `run` runs."""

    def __init__(self, store: Store, record: record_pb2.ServiceRecord, ttl_s: int) -> None:
        self._store = store
        self._record = record
        self._ttl_s = ttl_s
        self._leads = False
        self._changed = asyncio.Event()
        self._registration: Registration | None = None

    def show(self, leads: bool) -> None:
        """The instance leads, or no longer does."""
        self._leads = leads
        self._changed.set()

    async def run(self) -> None:
        """Register, again after every change, until cancelled."""
        while True:
            self._changed.clear()
            self._registration = self._registration_as(NAME if self._leads else STANDBY)
            registering = asyncio.create_task(self._registration.run())
            try:
                await self._changed.wait()
            finally:
                registering.cancel()
                await asyncio.wait([registering])
            await self._registration.withdraw()

    async def withdraw(self) -> None:
        """Disappear; call after `run` was cancelled."""
        if self._registration is not None:
            await self._registration.withdraw()

    def _registration_as(self, name: str) -> Registration:
        record = record_pb2.ServiceRecord()
        record.CopyFrom(self._record)
        record.name = name
        return Registration(
            self._store, f"{SERVICES}{name}/{record.incarnation}", record, self._ttl_s
        )
