"""An etcd client: leases, compare-and-swap, and watched prefixes.

Two features of the client library `etcd3aio` are replaced. Its keep-alive reports success after a
loss of quorum; here a lease counts as lost once its TTL has passed without an answer. Its watch
goes silent after a compaction, and its channel waits up to two minutes between reconnects; here a
watch ends at the first change, and a listing at least every `RELIST_S` detects missed changes.

An etcd that has lost writes is *rolled back* (`etcd_history`). Every snapshot has the number of
roll-backs before it, so that its reader can forget the revisions of the lost history.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
import grpc.aio
from etcd3aio._protobuf import (
    Compare,
    DeleteRangeRequest,
    LeaseGrantResponse,
    PutRequest,
    RangeResponse,
    RequestOp,
    TxnResponse,
    WatchCreateRequest,
    WatchRequest,
)
from etcd3aio.kv import prefix_range_end

from services.common.errors import StoreError, StoreRefused
from services.common.etcd_calls import EtcdCalls
from services.common.etcd_connection import CALL_TIMEOUT_S, EtcdConnection, EtcdLogin, EtcdMember
from services.common.etcd_history import EtcdHistory, Position
from services.common.service_config import DEFAULT_PREFIX, ServiceConfig
from services.common.timeouts import timeout
from services.common.tls import CertificateFiles

RELIST_S = 5.0
RETRY_S = 0.3
TLS_REMEDY = ", and check that 'etcd_ca_file' is the CA of its certificate"


@dataclass(frozen=True, slots=True)
class Entry:
    """A value with the revisions that conditions compare, and its lease (0: none)."""

    value: bytes
    create_revision: int
    mod_revision: int
    lease: int = 0


Listing = dict[str, Entry]


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """The entries at a revision of the store; `rollbacks`: how often it had lost writes."""

    entries: Listing
    revision: int
    rollbacks: int = 0


@dataclass(frozen=True, slots=True)
class Unchanged:
    """True while `key` has this modification revision; 0: while it is absent."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class SameCreation:
    """True while `key` has not been deleted since its creation at this revision."""

    key: str
    create_revision: int


Condition = Unchanged | SameCreation


class EtcdStatus(NamedTuple):
    """State of an etcd member."""

    version: str
    """Such as "3.5.16"."""
    alarms: tuple[str, ...]
    """As etcd words them, such as "memberID:1 alarm:NOSPACE" """


class Store:
    """Access to etcd keys below a prefix, which arguments and results exclude.

    Call `connect` first. Calls time out after `CALL_TIMEOUT_S`.
    """

    def __init__(
        self, url: str, prefix: str = DEFAULT_PREFIX, login: EtcdLogin | None = None
    ) -> None:
        """`url`: host:port, with or without http:// or https://; several are comma-separated.

        Raises:
            ConfigError: if a URL is invalid or a certificate file is unusable.
        """
        self.url = url
        self._prefix = prefix
        self._connection = EtcdConnection(url, login or EtcdLogin())
        self._history = EtcdHistory(url, self.calls)

    @property
    def calls(self) -> EtcdCalls:
        """Statistics of the calls, for metrics."""
        return self._connection.calls

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Wait until etcd answers.

        Raises:
            StoreRefused: if etcd does not let this user read the keys.
            StoreError: if etcd does not answer within `timeout_s`.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                # A read proves that this user has access, not only that etcd is reachable.
                await self.list_prefix("")
                return
            except StoreRefused:
                await self.close()
                raise
            except StoreError as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    await self.close()
                    raise StoreError(
                        f"etcd at {self.url} cannot be reached; start it, or correct its URL"
                        f"{TLS_REMEDY if self.url.startswith('https') else ''}"
                    ) from error
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the connection, if it is open."""
        await self._connection.close()

    async def status(self) -> EtcdStatus:
        """Version and alarms of the etcd member in use. Raises StoreError."""

        async def ask(member: EtcdMember) -> EtcdStatus:
            status = await member.maintenance.status(timeout=CALL_TIMEOUT_S)
            return EtcdStatus(str(status.version), tuple(map(str.strip, status.errors)))

        return await self._connection.call_any(ask)

    async def list_prefix(self, prefix: str) -> Listing:
        """All entries below `prefix`; linearizable."""
        return (await self.snapshot(prefix)).entries

    async def snapshot(self, prefix: str) -> StoreSnapshot:
        """All entries below `prefix` with the store's revision; linearizable."""
        full, before = self._full(prefix), self._history.position

        async def get(member: EtcdMember) -> RangeResponse:
            end = prefix_range_end(full)
            return await member.kv.get(full, range_end=end, timeout=CALL_TIMEOUT_S)

        response = await self._connection.call_any(get)
        listing = {
            item.key.decode(errors="replace").removeprefix(self._prefix): Entry(
                item.value, item.create_revision, item.mod_revision, item.lease
            )
            for item in response.kvs
        }
        rollbacks = self._note(before, response)
        return StoreSnapshot(listing, int(response.header.revision), rollbacks)

    async def read(self, key: str) -> Entry | None:
        """The entry of `key`, None if it is absent; linearizable. Raises StoreError."""
        return (await self.list_prefix(key)).get(key)

    async def put_if(
        self,
        key: str,
        value: bytes,
        mod_revision: int,
        lease: int = 0,
        also: Sequence[Condition] = (),
    ) -> bool:
        """Write `key` if its modification revision is still `mod_revision` (0: absent).

        Returns False if another writer was first, or a condition in `also` does not hold.

        Raises:
            StoreError: without an answer; the write may have been applied, so list again.
        """
        full = self._full(key)
        put = RequestOp(request_put=PutRequest(key=full, value=value, lease=lease))
        return bool(await self._txn([Unchanged(key, mod_revision), *also], [put]))

    async def put(self, key: str, value: bytes, lease: int = 0) -> None:
        """Write `key` unconditionally; for keys with a single writer. Raises StoreError."""
        put = RequestOp(request_put=PutRequest(key=self._full(key), value=value, lease=lease))
        await self._txn([], [put])

    async def transact(
        self,
        conditions: Sequence[Condition],
        writes: Mapping[str, bytes],
        deletes: Sequence[str] = (),
    ) -> int:
        """Write and delete atomically if all conditions hold.

        At most 128 conditions, and 128 writes and deletes together.

        Returns the revision of the write, or 0 if a condition failed and nothing was written.

        Raises:
            StoreError: without an answer. The writes may have been applied, or may still be
                applied: read them back, never repeat them.
        """
        puts = [
            RequestOp(request_put=PutRequest(key=self._full(key), value=value))
            for key, value in writes.items()
        ]
        removals = [
            RequestOp(request_delete_range=DeleteRangeRequest(key=self._full(key)))
            for key in deletes
        ]
        return await self._txn(conditions, puts + removals)

    async def grant_lease(self, ttl_s: int) -> int:
        """Create a lease; returns its id."""

        async def grant(member: EtcdMember) -> LeaseGrantResponse:
            return await member.lease.grant(ttl=ttl_s, timeout=CALL_TIMEOUT_S)

        # If the answer is lost, the granted lease expires, so trying another member is safe.
        return int((await self._connection.call_any(grant)).ID)

    async def keep_alive(self, lease: int) -> float:
        """Renew `lease` once; returns its remaining seconds, 0 if it has expired."""

        async def renew(member: EtcdMember) -> float:
            async with timeout(CALL_TIMEOUT_S):
                async for response in member.lease.keep_alive(lease):
                    return float(max(0, response.TTL))
            raise StoreError(f"etcd at {self.url} ended a lease renewal without an answer")

        return await self._connection.call_any(renew)

    async def revoke_lease(self, lease: int) -> None:
        """End `lease`, which deletes its keys."""

        async def revoke(member: EtcdMember) -> None:
            await member.lease.revoke(lease, timeout=CALL_TIMEOUT_S)

        await self._connection.call(revoke)

    async def follow_prefix(self, prefix: str) -> AsyncIterator[StoreSnapshot]:
        """Yield the entries below `prefix` now, after every change, and every `RELIST_S`.

        Never ends. Yields nothing while etcd is unreachable. The periodic listings detect changes
        that a silent watch has missed.
        """
        before = StoreSnapshot({}, 0)
        while True:
            try:
                snapshot = await self.snapshot(prefix)
            except StoreError:
                await asyncio.sleep(RETRY_S)
                continue
            outdated = _outdated_key(snapshot, before)
            if outdated is not None:
                self._history.note_outdated(outdated, snapshot.rollbacks)
                continue
            before = snapshot
            yield snapshot
            await self._wait_for_change(prefix, snapshot.revision)

    async def _wait_for_change(self, prefix: str, revision: int) -> None:
        """Return after a change below `prefix` later than `revision`, or after `RELIST_S`.

        Also returns when the watch breaks or is refused; the next listing then fails as well.
        """
        full = self._full(prefix)
        create = WatchCreateRequest(
            key=full, range_end=prefix_range_end(full), start_revision=revision + 1
        )
        call = (await self._connection.member()).open_watch()
        try:
            async with timeout(RELIST_S):
                await call.write(WatchRequest(create_request=create))
                while (response := await call.read()) is not grpc.aio.EOF:
                    if response.events:
                        return
                    if response.canceled:
                        break
            # Back off, so that an etcd that refuses watches is not polled in a tight loop.
            await asyncio.sleep(RETRY_S)
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            return
        finally:
            call.cancel()

    async def _txn(self, conditions: Sequence[Condition], operations: list[RequestOp]) -> int:
        compares = [self._compare(condition) for condition in conditions]
        before = self._history.position

        async def txn(member: EtcdMember) -> TxnResponse:
            return await member.kv.txn(compares, operations, timeout=CALL_TIMEOUT_S)

        response = await self._connection.call(txn)
        self._note(before, response)
        return int(response.header.revision) if response.succeeded else 0

    def _note(self, before: Position, response: RangeResponse | TxnResponse) -> int:
        header = response.header
        return self._history.note_response(before, int(header.cluster_id), int(header.revision))

    def _compare(self, condition: Condition) -> Compare:
        key = self._full(condition.key)
        match condition:
            case Unchanged():
                return Compare(
                    key=key,
                    target=Compare.MOD,
                    result=Compare.EQUAL,
                    mod_revision=condition.mod_revision,
                )
            case SameCreation():
                return Compare(
                    key=key,
                    target=Compare.CREATE,
                    result=Compare.EQUAL,
                    create_revision=condition.create_revision,
                )

    def _full(self, key: str) -> bytes:
        return f"{self._prefix}{key}".encode()


def _outdated_key(snapshot: StoreSnapshot, before: StoreSnapshot) -> str | None:
    """A key with an older write than in `before`, or with another write of the same revision."""
    if snapshot.rollbacks != before.rollbacks:
        return None
    for key, entry in snapshot.entries.items():
        known = before.entries.get(key)
        if known is not None and known != entry and known.mod_revision >= entry.mod_revision:
            return key
    return None


def open_store(config: ServiceConfig) -> Store:
    """The store of a service's configuration, not connected yet.

    Raises:
        ConfigError: if a URL is invalid or a certificate file is unusable.
    """
    files = CertificateFiles(
        "etcd", config.etcd_ca_file, config.etcd_cert_file, config.etcd_key_file
    )
    login = EtcdLogin(config.etcd_user, config.etcd_password, files)
    return Store(config.etcd_url, config.etcd_prefix, login)
