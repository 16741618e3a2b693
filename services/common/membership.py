"""Who is there: registrations on leases, and views of the records of others.

A lease tells who is probably alive; it never tells who may act (that is what epochs are for).
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from google.protobuf import json_format
from google.protobuf.message import Message

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.common.etcd import Entry, Store

SERVICES = "/tideserve/services/"
WORKERS = "/tideserve/workers/"
GROUPS = "/tideserve/groups/"

log = logging.getLogger(__name__)
M = TypeVar("M", bound=Message)


def encode_record(record: Message) -> bytes:
    """A record as it stands in etcd: protobuf JSON."""
    return json_format.MessageToJson(record, indent=None).encode()


def decode_record(kind: type[M], value: bytes) -> M | None:
    """The record in an etcd value, or None when it is not one (ignored, with a warning)."""
    try:
        return json_format.Parse(value, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError) as error:
        log.warning("ignoring a malformed %s in etcd: %s", kind.__name__, error)
        return None


class Registration:
    """Keeps one key alive on a lease for as long as `run` runs.

    The key is created only when it is absent, so a restarted process waits until its predecessor's
    lease has ended. After a lost lease the same record is written again under a new one.
    """

    def __init__(self, store: Store, key: str, record: Message, ttl_s: int) -> None:
        self._store = store
        self._key = key
        self._value = encode_record(record)
        self._ttl_s = ttl_s
        self._lease = 0
        self.registered = asyncio.Event()

    async def run(self) -> None:
        """Register and renew until cancelled."""
        while True:
            try:
                await self._register()
                await self._renew()
            except StoreError as error:
                log.warning("registration of %s: %s", self._key, error)
            self.registered.clear()
            await asyncio.sleep(0.3)

    async def withdraw(self) -> None:
        """Remove the key; call after `run` was cancelled. Errors are left to the lease."""
        if self._lease:
            try:
                await self._store.revoke_lease(self._lease)
            except StoreError as error:
                log.warning("withdrawal of %s is left to its lease: %s", self._key, error)

    async def _register(self) -> None:
        self._lease = await self._store.grant_lease(self._ttl_s)
        while not await self._store.put_if(self._key, self._value, 0, self._lease):
            entry = (await self._store.list_prefix(self._key)).get(self._key)
            if entry is not None and entry.value == self._value:
                # Our own earlier write, under a lease that we lost track of.
                await self._store.put_if(self._key, self._value, entry.mod_revision, self._lease)
                break
            log.info("%s is still held by a predecessor; waiting for its lease to end", self._key)
            await asyncio.sleep(0.5)
            if await self._store.keep_alive(self._lease) == 0:
                raise StoreError("lease ended while waiting for the predecessor's")
        self.registered.set()
        log.info("registered %s", self._key)

    async def _renew(self) -> None:
        """Return when the lease is lost: etcd says so, or its time has passed unanswered."""
        expires_s = monotonic_s() + self._ttl_s
        while monotonic_s() < expires_s:
            await asyncio.sleep(self._ttl_s / 4)
            asked_s = monotonic_s()
            try:
                left_s = await self._store.keep_alive(self._lease)
            except StoreError as error:
                log.warning("lease of %s not renewed: %s", self._key, error)
                continue
            if left_s == 0:
                return
            expires_s = asked_s + left_s


class Directory(Generic[M]):
    """A live view of the records below a prefix.

    `records` maps key to record. While etcd is away the last view stays.
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
        self.loaded = asyncio.Event()

    async def run(self) -> None:
        """Follow the prefix until cancelled."""
        async for listing in self._store.follow_prefix(self._prefix):
            if listing == self.entries and self.loaded.is_set():
                continue
            decoded = {
                key: record
                for key, entry in listing.items()
                if (record := decode_record(self._kind, entry.value)) is not None
            }
            self.entries = listing
            self.records = decoded
            self.loaded.set()
            if self._on_change is not None:
                self._on_change()

    def newest(self, prefix: str) -> M | None:
        """The record below `prefix` that was created last: the live instance after a restart."""
        keys = [key for key in self.records if key.startswith(prefix)]
        return (
            self.records[max(keys, key=lambda k: self.entries[k].create_revision)] if keys else None
        )
