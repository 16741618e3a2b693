"""Registers services and workers in etcd with leases, and follows the records of others.

A lease shows that a process is probably alive. It never permits actions: epochs and fencing tokens
do.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from google.protobuf.message import Message

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.common.etcd import RETRY_S, Condition, Entry, Store
from services.common.records import encode_record, read_record
from tideserve.common.v1 import record_pb2

SERVICES = "services/"
WORKERS = "workers/"
GROUPS = "groups/"
ASSIGNMENTS = "assignments/"
LEADERS = "leaders/"
QUOTAS = "quotas/"
ROLES = "roles/"
ADAPTERS = "adapters/"
EPOCH_FLOOR = "epoch_floor"

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


Claim = Callable[[Entry | None], Awaitable[Sequence[Condition]]]


class Registration:
    """Keeps a key alive on a lease while `run` runs.

    The key is created only if it is absent, so a restarted process waits until the lease of its
    predecessor has expired. If the lease is lost, or the key is deleted or replaced, the record is
    written again under a new lease. Exactly one of the events `registered` and `lost` is set.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        record: Message,
        ttl_s: int,
        claim: Claim | None = None,
    ) -> None:
        """`claim` returns the conditions that must hold in etcd at registration (default: none), or
        raises the error that ends `run`.

        It is called again at least every `RELIST_S`, with the key's entry, so that it can restore
        the records that it depends on; before registration it is called with None.
        """
        self._store = store
        self._key = key
        self._value = encode_record(record)
        self._ttl_s = ttl_s
        self._claim = claim
        self._lease = 0
        self.registered = asyncio.Event()
        self.lost = asyncio.Event()
        self.lost.set()

    async def run(self) -> None:
        """Register and renew until cancelled."""
        failing = False
        while True:
            try:
                await self._register()
                failing = False
                await self._hold()
            except StoreError as error:
                if not failing:
                    log.warning("registration of %s failed, retrying: %s", self._key, error)
                failing = True
            self.registered.clear()
            self.lost.set()
            await asyncio.sleep(RETRY_S)

    async def update(self, record: Message) -> None:
        """Replace the record while `run` runs; waits while etcd is down."""
        self._value, before = encode_record(record), self._value
        while True:
            try:
                entry = await self._store.read(self._key)
                if entry is not None and entry.value == self._value:
                    return
                # While the key is absent, `run` registers it, possibly with the old record.
                if (
                    entry is not None
                    and entry.value == before
                    and await self._store.put_if(
                        self._key, self._value, entry.mod_revision, self._lease
                    )
                ):
                    return
            except StoreError:
                pass
            await asyncio.sleep(RETRY_S)

    async def withdraw(self) -> None:
        """Delete the key; call after `run` was cancelled. On errors the key ends with its lease."""
        lease, self._lease = self._lease, 0
        if lease:
            try:
                await self._store.revoke_lease(lease)
            except StoreError as error:
                log.warning("cannot withdraw %s, its lease will end it: %s", self._key, error)

    async def _register(self) -> None:
        self._lease = await self._store.grant_lease(self._ttl_s)
        waiting = False
        while not await self._write():
            if not waiting:
                log.info("waiting for the lease of the predecessor that holds %s", self._key)
            waiting = True
            await asyncio.sleep(RETRY_S)
            if await self._store.keep_alive(self._lease) == 0:
                raise StoreError("the lease ended while waiting for the predecessor's lease")
        self.lost.clear()
        self.registered.set()
        log.info("registered %s", self._key)

    async def _write(self) -> bool:
        """Write the key under our lease; False while another process holds it."""
        entry = await self._store.read(self._key)
        if entry is not None and entry.value != self._value:
            return False
        also = await self._conditions(None)
        # If the key is from an earlier attempt or lease, move it to the current lease.
        revision = entry.mod_revision if entry is not None else 0
        return await self._store.put_if(self._key, self._value, revision, self._lease, also)

    async def _conditions(self, registered: Entry | None) -> Sequence[Condition]:
        return await self._claim(registered) if self._claim is not None else ()

    async def _hold(self) -> None:
        """Return when the lease or the key is lost."""
        holding = [asyncio.create_task(hold()) for hold in (self._renew, self._watch_key)]
        try:
            await asyncio.wait(holding, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in holding:
                task.cancel()
            ended = await asyncio.gather(*holding, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _watch_key(self) -> None:
        """Return when the key is not under our lease any more: deleted, or another process's."""
        async for snapshot in self._store.follow_prefix(self._key):
            entry = snapshot.entries.get(self._key)
            if entry is None or entry.lease != self._lease:
                log.warning("%s is gone from etcd or replaced; registering again", self._key)
                return
            with contextlib.suppress(StoreError):
                await self._conditions(entry)

    async def _renew(self) -> None:
        """Return when the lease is lost: etcd reports it, or its TTL passes without an answer."""
        expires_s = monotonic_s() + self._ttl_s
        while (left_s := expires_s - monotonic_s()) > 0:
            # Renew early enough for several attempts within the TTL.
            await asyncio.sleep(min(self._ttl_s / 4, left_s))
            # Count from before the call, as etcd may have renewed the lease at its very beginning.
            sent_s = monotonic_s()
            try:
                left_s = await self._store.keep_alive(self._lease)
            except StoreError as error:
                log.warning("cannot renew the lease of %s: %s", self._key, error)
                continue
            if left_s == 0:
                return
            expires_s = sent_s + left_s


class Directory(Generic[M]):
    """The valid records below a prefix, kept current while `run` runs.

    `records` maps keys to records. While etcd is down, the last records remain.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        kind: type[M],
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._kind = kind
        self._on_change = on_change
        self.records: dict[str, M] = {}
        self.entries: dict[str, Entry] = {}
        self.rollbacks = 0  # of the store, before `entries` were read
        self.loaded = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the prefix until cancelled."""
        async for snapshot in self._store.follow_prefix(self._prefix):
            listing = snapshot.entries
            is_current = listing == self.entries and snapshot.rollbacks == self.rollbacks
            if is_current and self.loaded.is_set():
                continue
            decoded = {
                key: record
                for key, entry in listing.items()
                if (record := self._decoded(key, entry)) is not None
            }
            self.entries, self.rollbacks = listing, snapshot.rollbacks
            self.records = decoded
            self.loaded.set()
            # Replace the event at each change, so that no waiter has to clear it.
            self._changed.set()
            self._changed = asyncio.Event()
            if self._on_change is not None:
                self._on_change()

    def _decoded(self, key: str, entry: Entry) -> M | None:
        """The record of an entry, decoded only if the entry has changed."""
        if self.entries.get(key) == entry:
            return self.records.get(key)
        return read_record(self._kind, key, entry.value)

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        """Return once `predicate` holds; it is evaluated after every change."""
        while not predicate():
            await self._changed.wait()

    def newest(self, prefix: str) -> M | None:
        """The most recently created record below `prefix`; after a restart, the live instance."""
        keys = [key for key in self.records if key.startswith(prefix)]
        return (
            self.records[max(keys, key=lambda k: self.entries[k].create_revision)] if keys else None
        )


def read_floor(entry: Entry | None) -> tuple[int, int]:
    """The epoch floor and the revision of its record; 0 and 0 if absent."""
    if entry is None:
        return 0, 0
    record = read_record(record_pb2.EpochFloorRecord, EPOCH_FLOOR, entry.value)
    return record.epoch if record is not None else entry.mod_revision, entry.mod_revision
