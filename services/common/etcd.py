"""etcd behind an interface of our own: leases, compare-and-swap, a view of a prefix.

The client library's keep-alive claims life after a quorum loss, so a lease counts as lost once its
time has passed without an answer. Its watch goes silent after a compaction and its channel waits up
to two minutes between attempts to reconnect, so both are ours: a watch here ends at the first
change, and is backed by a periodic listing.
"""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from etcd3aio._protobuf import (
    Compare,
    DeleteRangeRequest,
    PutRequest,
    RequestOp,
    WatchCreateRequest,
    WatchRequest,
    WatchStub,
)
from etcd3aio.errors import EtcdError, EtcdTransientError
from etcd3aio.kv import KVService, prefix_range_end
from etcd3aio.lease import LeaseService

from services.common.errors import StoreError, StoreTimeout
from services.common.grpc_client import CHANNEL_OPTIONS
from services.common.timeouts import timeout

# etcd takes a ping on a connection without a call for an attack, and closes it.
ETCD_OPTIONS = {
    **dict(CHANNEL_OPTIONS),
    "grpc.keepalive_permit_without_calls": 0,
    "grpc.lb_policy_name": "round_robin",
}
CALL_TIMEOUT_S = 3.0
RELIST_S = 5.0
RETRY_S = 0.3


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the revisions that fence it."""

    value: bytes
    create_revision: int
    mod_revision: int


Listing = dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries as they stood at one revision of the store."""

    entries: Listing
    revision: int


@dataclass(frozen=True, slots=True)
class Unchanged:
    """Holds while `key` has this modification revision; 0 means that it is absent."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class SameCreation:
    """Holds while `key` is the one that was created at this revision."""

    key: str
    create_revision: int


Condition = Unchanged | SameCreation


class Store:
    """A connection to etcd; call `connect` first. Every call has a deadline of `CALL_TIMEOUT_S`."""

    def __init__(self, url: str) -> None:
        """`url`: host:port, with or without http://; several separated by commas."""
        self.url = url
        self._endpoints = [
            part.strip().removeprefix("http://").rstrip("/") for part in url.split(",")
        ]
        self._channel: grpc.aio.Channel | None = None

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Open the channel and wait for an answer.

        Raises:
            StoreError: if etcd does not answer within `timeout_s`.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self._open()
                await self.list_prefix("/tideserve/")
                return
            except StoreError as error:
                if asyncio.get_running_loop().time() > deadline_s:
                    await self.close()
                    raise StoreError(
                        f"etcd at {self.url} cannot be reached; start it, or correct its URL"
                    ) from error
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the channel; no effect if it is not open."""
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    async def _open(self) -> None:
        if self._channel is not None:
            return
        target = await _target(self._endpoints)
        self._channel = grpc.aio.insecure_channel(target, options=tuple(ETCD_OPTIONS.items()))
        self._kv = KVService(self._channel, max_attempts=1)
        self._lease = LeaseService(self._channel, max_attempts=1)
        self._open_watch = WatchStub(self._channel).Watch

    async def list_prefix(self, prefix: str) -> Listing:
        """All entries below `prefix`, linearizable."""
        return (await self.snapshot(prefix)).entries

    async def snapshot(self, prefix: str) -> Snapshot:
        """All entries below `prefix` and the revision at which they stand so, linearizable."""
        with _translated():
            response = await self._kv.get(
                prefix,
                range_end=prefix_range_end(prefix),
                timeout=CALL_TIMEOUT_S,
            )
        listing = {
            item.key.decode(): Entry(item.value, item.create_revision, item.mod_revision)
            for item in response.kvs
        }
        return Snapshot(listing, int(response.header.revision))

    async def put_if(self, key: str, value: bytes, mod_revision: int, lease: int = 0) -> bool:
        """Write `key` if its modification revision is still `mod_revision` (0: absent).

        Returns False if somebody else was first.

        Raises:
            StoreError: if no answer came; the write may have been applied, so list again.
        """
        put = RequestOp(request_put=PutRequest(key=key.encode(), value=value, lease=lease))
        return bool(await self._txn([Unchanged(key, mod_revision)], [put]))

    async def delete_if(self, key: str, create_revision: int) -> bool:
        """Delete `key` if it is still the one created at `create_revision`."""
        delete = RequestOp(request_delete_range=DeleteRangeRequest(key=key.encode()))
        return bool(await self._txn([SameCreation(key, create_revision)], [delete]))

    async def transact(self, conditions: Sequence[Condition], writes: Mapping[str, bytes]) -> int:
        """Write everything at once if all conditions hold; at most 128 of each.

        Returns the revision of the writes, or 0 if a condition does not hold: nothing is written
        then.

        Raises:
            StoreError: if no answer came. The writes may have been applied, or may be yet: read
                back, never repeat.
        """
        puts = [
            RequestOp(request_put=PutRequest(key=key.encode(), value=value))
            for key, value in writes.items()
        ]
        return await self._txn(conditions, puts)

    async def grant_lease(self, ttl_s: int) -> int:
        """A new lease's id."""
        with _translated():
            response = await self._lease.grant(ttl=ttl_s, timeout=CALL_TIMEOUT_S)
        return int(response.ID)

    async def keep_alive(self, lease: int) -> float:
        """Renew `lease` once; returns its time to live in seconds, 0 if it has expired."""
        with _translated():
            async with timeout(CALL_TIMEOUT_S):
                async for response in self._lease.keep_alive(lease):
                    return float(max(0, response.TTL))
        raise StoreError(f"etcd at {self.url} ended a lease renewal without an answer")

    async def revoke_lease(self, lease: int) -> None:
        """End `lease` and delete its keys."""
        with _translated():
            await self._lease.revoke(lease, timeout=CALL_TIMEOUT_S)

    async def follow_prefix(self, prefix: str) -> AsyncIterator[Snapshot]:
        """Yield the entries below `prefix` now and after every change, for ever.

        While etcd cannot be reached nothing is yielded: the last view stays in force. Listings are
        repeated every `RELIST_S` at the latest, so a silent watch heals.
        """
        while True:
            try:
                snapshot = await self.snapshot(prefix)
            except StoreError:
                await asyncio.sleep(RETRY_S)
                continue
            yield snapshot
            await self._wait_for_change(prefix, snapshot.revision)

    async def _wait_for_change(self, prefix: str, revision: int) -> None:
        """Return after a change below `prefix` later than `revision`, at the latest in `RELIST_S`.

        Also returns when the watch breaks or is refused, since a listing then tells more.
        """
        create = WatchCreateRequest(
            key=prefix.encode(), range_end=prefix_range_end(prefix), start_revision=revision + 1
        )
        call = self._open_watch()
        try:
            async with timeout(RELIST_S):
                await call.write(WatchRequest(create_request=create))
                while (response := await call.read()) is not grpc.aio.EOF:
                    if response.events:
                        return
                    if response.canceled:
                        break
            # Never spin on a refusal.
            await asyncio.sleep(RETRY_S)
        except (TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
            return
        finally:
            call.cancel()

    async def _txn(self, conditions: Sequence[Condition], operations: list[RequestOp]) -> int:
        with _translated():
            response = await self._kv.txn(
                [_compare(condition) for condition in conditions],
                operations,
                timeout=CALL_TIMEOUT_S,
            )
        return int(response.header.revision) if response.succeeded else 0


def _compare(condition: Condition) -> Compare:
    key = condition.key.encode()
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


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn the library's errors into ours."""
    try:
        yield
    except (TimeoutError, EtcdTransientError) as error:
        raise StoreTimeout("etcd did not answer in time") from error
    except (EtcdError, grpc.RpcError) as error:
        raise StoreError(f"etcd call failed: {error}") from error


async def _target(endpoints: list[str]) -> str:
    """What gRPC connects to: one name as it is, several resolved to addresses.

    Raises:
        StoreError: if a name cannot be resolved.
    """
    if len(endpoints) == 1:
        return endpoints[0]
    loop = asyncio.get_running_loop()
    addresses = []
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        try:
            found = await loop.getaddrinfo(
                host, port, family=socket.AF_INET, type=socket.SOCK_STREAM
            )
        except OSError as error:
            raise StoreError(f"the etcd endpoint '{endpoint}' cannot be resolved") from error
        addresses.append("{}:{}".format(*found[0][4]))
    return f"ipv4:{','.join(addresses)}"
