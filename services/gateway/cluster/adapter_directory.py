"""The LoRA adapters that clients can use, as records in etcd which all gateways follow."""

import contextlib
from collections.abc import Callable
from urllib.parse import quote

from services.common.adapter_messages import adapter_of_record
from services.common.errors import StoreError
from services.common.etcd import Store, Unchanged
from services.common.membership import ADAPTERS, Directory
from services.common.records import encode_record
from services.common.timeouts import timeout
from services.core.adapter import Adapter
from tideserve.common.v1 import adapter_pb2

FOLLOW_TIMEOUT_S = 5.0
"""Maximum seconds to wait for all records at the start, and to read back a written record."""


class ChangedMeanwhile(Exception):
    """Another gateway has written or deleted the record; nothing was written."""


def adapter_key(name: str) -> str:
    """The etcd key of an adapter's record."""
    return f"{ADAPTERS}{quote(name, safe='')}"


class AdapterDirectory:
    """Follows the records of adapters; reads from memory, writes to etcd."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._directory = Directory(store, ADAPTERS, adapter_pb2.AdapterRecord)

    async def run(self) -> None:
        """Follow etcd until cancelled; the last records remain while it is down."""
        await self._directory.run()

    async def loaded(self) -> None:
        """Wait until all records have been read, or the time limit has passed."""
        with contextlib.suppress(TimeoutError):
            async with timeout(FOLLOW_TIMEOUT_S):
                await self._directory.loaded.wait()

    def record(self, name: str) -> adapter_pb2.AdapterRecord | None:
        """The record of an adapter, or None."""
        return self._directory.records.get(adapter_key(name))

    def adapter(self, name: str) -> tuple[str, Adapter] | None:
        """The name of an adapter's model, and the adapter for requests; None if it is unknown."""
        record = self.record(name)
        return None if record is None else (record.base, adapter_of_record(record))

    def names(self) -> list[str]:
        """The names of all adapters, sorted."""
        return sorted(record.name for record in self._directory.records.values())

    def revision(self, name: str) -> int:
        """Revision of the adapter's record, 0 without one; for `write` and `delete`."""
        entry = self._directory.entries.get(adapter_key(name))
        return 0 if entry is None else entry.mod_revision

    async def write(self, record: adapter_pb2.AdapterRecord, revision: int) -> None:
        """Write a record, unless its revision has changed, and wait until it is read back here.

        Raises:
            ChangedMeanwhile: if its revision has changed.
            StoreError: if etcd does not answer; the record may have been written.
        """
        key, value = adapter_key(record.name), encode_record(record)
        if not await self._store.put_if(key, value, revision):
            raise ChangedMeanwhile
        await self._follow(lambda: self.record(record.name) == record)

    async def delete(self, name: str, revision: int) -> None:
        """Delete a record, unless its revision has changed; as `write`."""
        key = adapter_key(name)
        if not await self._store.transact([Unchanged(key, revision)], {}, [key]):
            raise ChangedMeanwhile
        await self._follow(lambda: self.record(name) is None)

    async def _follow(self, seen: Callable[[], bool]) -> None:
        try:
            async with timeout(FOLLOW_TIMEOUT_S):
                await self._directory.wait_for(seen)
        except TimeoutError as error:
            raise StoreError("etcd has the change, but its watch does not deliver it") from error
