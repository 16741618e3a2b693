"""Leader election among the instances of a service, through the key `leaders/<service>`.

The lease of the key only shows which instance is probably alive. The fencing token, which is the
key's creation revision, prevents a stalled leader from acting: every write compares it, and workers
refuse orders with a lower token than they have received before.
"""

import asyncio
import logging
from collections.abc import Callable

from services.common.errors import StoreError
from services.common.etcd import RETRY_S, Store
from services.common.membership import LEADERS, Registration
from services.common.records import encode_record
from tideserve.common.v1 import record_pb2

log = logging.getLogger(__name__)


class Election:
    """Campaigns for leadership while `run` runs. `token` is 0 unless this instance leads."""

    def __init__(
        self,
        store: Store,
        service: str,
        record: record_pb2.ServiceRecord,
        ttl_s: int,
        on_change: Callable[[int], None],
    ) -> None:
        """`record` identifies the leader; `on_change` is called with every new token."""
        self._store = store
        self._key = leader_key(service)
        self._value = encode_record(record)
        self._registration = Registration(store, self._key, record, ttl_s)
        self._on_change = on_change
        self.token = 0

    async def run(self) -> None:
        """Campaign, lead, and campaign again until cancelled, which ends the leadership."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._registration.run())
            try:
                while True:
                    await self._registration.registered.wait()
                    # A new registration creates the key again, with a new token.
                    self._set(await self._read_token())
                    await self._registration.lost.wait()
                    self._set(0)
            finally:
                self._set(0)

    async def resign(self) -> None:
        """Let another instance take over at once; call after `run` was cancelled."""
        await self._registration.withdraw()

    async def _read_token(self) -> int:
        """The creation revision of our key; 0 if the key is not ours."""
        while self._registration.registered.is_set():
            try:
                entry = await self._store.read(self._key)
            except StoreError:
                await asyncio.sleep(RETRY_S)
                continue
            if entry is not None and entry.value == self._value:
                return entry.create_revision
            # The key was deleted, which the registration detects as well.
            await asyncio.sleep(RETRY_S)
        return 0

    def _set(self, token: int) -> None:
        if token != self.token:
            self.token = token
            log.info("leads with token %d" if token else "does not lead (%d)", token)
            self._on_change(token)


def leader_key(service: str) -> str:
    """The key that the leader of a service holds."""
    return f"{LEADERS}{service}"
