"""etcd behind an interface of our own: leases, compare-and-swap, a view of a prefix.

The client library's watch goes silent after a compaction and its keep-alive claims life after a
quorum loss, so a watch here is always backed by a periodic listing, and a lease counts as lost
once its time has passed without an answer.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import grpc
from etcd3aio import Etcd3Client
from etcd3aio._protobuf import Compare, DeleteRangeRequest, PutRequest, RequestOp
from etcd3aio.errors import EtcdError
from etcd3aio.kv import prefix_range_end

from services.common.errors import StoreError, StoreTimeout

CALL_TIMEOUT_S = 3.0
RELIST_S = 5.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A value and the revisions that fence it."""

    value: bytes
    create_revision: int
    mod_revision: int


Listing = dict[str, Entry]


class Store:
    """A connection to etcd. Every call has a deadline of `CALL_TIMEOUT_S`."""

    def __init__(self, url: str) -> None:
        """`url`: host:port, with or without http://; several separated by commas."""
        self.url = url
        endpoints = [part.strip().removeprefix("http://").rstrip("/") for part in url.split(",")]
        self._client = Etcd3Client(endpoints)

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Open the channel and wait for an answer.

        Raises:
            StoreError: if etcd does not answer within `timeout_s`.
        """
        await self._client.connect()
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            try:
                await self.list_prefix("/tideserve/")
                return
            except StoreError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise StoreError(
                        f"etcd at {self.url} cannot be reached; start it, or correct its URL"
                    ) from error
                await asyncio.sleep(0.2)

    async def close(self) -> None:
        """Close the channel."""
        await self._client.close()

    async def list_prefix(self, prefix: str) -> Listing:
        """All entries below `prefix`, linearizable."""
        listing, _ = await self._list(prefix)
        return listing

    async def put_if(self, key: str, value: bytes, mod_revision: int, lease: int = 0) -> bool:
        """Write `key` if its modification revision is still `mod_revision` (0: absent).

        Returns False if somebody else was first.

        Raises:
            StoreTimeout: if no answer came; the write may have been applied, so list again.
        """
        compare = Compare(
            key=key.encode(), target=Compare.MOD, result=Compare.EQUAL, mod_revision=mod_revision
        )
        put = RequestOp(request_put=PutRequest(key=key.encode(), value=value, lease=lease))
        return await self._txn(compare, put)

    async def delete_if(self, key: str, create_revision: int) -> bool:
        """Delete `key` if it is still the one created at `create_revision`."""
        compare = Compare(
            key=key.encode(),
            target=Compare.CREATE,
            result=Compare.EQUAL,
            create_revision=create_revision,
        )
        delete = RequestOp(request_delete_range=DeleteRangeRequest(key=key.encode()))
        return await self._txn(compare, delete)

    async def grant_lease(self, ttl_s: int) -> int:
        """A new lease's id."""
        assert self._client.lease is not None
        with _translated():
            response = await self._client.lease.grant(
                ttl=ttl_s, timeout=CALL_TIMEOUT_S, max_attempts=1
            )
        return int(response.ID)

    async def keep_alive(self, lease: int) -> float:
        """Renew `lease` once; returns its time to live in seconds, 0 if it has expired."""
        assert self._client.lease is not None
        with _translated():
            async with asyncio.timeout(CALL_TIMEOUT_S):
                async for response in self._client.lease.keep_alive(lease):
                    return float(max(0, response.TTL))
        raise StoreError(f"etcd at {self.url} ended a lease renewal without an answer")

    async def revoke_lease(self, lease: int) -> None:
        """End `lease` and delete its keys."""
        assert self._client.lease is not None
        with _translated():
            await self._client.lease.revoke(lease, timeout=CALL_TIMEOUT_S, max_attempts=1)

    async def follow_prefix(self, prefix: str) -> AsyncIterator[Listing]:
        """Yield the entries below `prefix` now and after every change, for ever.

        While etcd cannot be reached nothing is yielded: the last view stays in force. Listings are
        repeated every `RELIST_S` at the latest, so a silent watch heals.
        """
        assert self._client.watch is not None
        while True:
            try:
                listing, revision = await self._list(prefix)
            except StoreError:
                await asyncio.sleep(0.3)
                continue
            yield dict(listing)
            watch = self._client.watch.watch(
                prefix, range_end=prefix_range_end(prefix), start_revision=revision + 1
            )
            with contextlib.suppress(TimeoutError, EtcdError, grpc.RpcError):
                async with contextlib.aclosing(watch) as responses, asyncio.timeout(RELIST_S):
                    async for response in responses:
                        if response.events or response.canceled:
                            break

    async def _list(self, prefix: str) -> tuple[Listing, int]:
        assert self._client.kv is not None
        with _translated():
            response = await self._client.kv.get(
                prefix,
                range_end=prefix_range_end(prefix),
                timeout=CALL_TIMEOUT_S,
                max_attempts=1,
            )
        listing = {
            item.key.decode(): Entry(item.value, item.create_revision, item.mod_revision)
            for item in response.kvs
        }
        return listing, int(response.header.revision)

    async def _txn(self, compare: Compare, operation: RequestOp) -> bool:
        assert self._client.kv is not None
        with _translated():
            response = await self._client.kv.txn(
                [compare], [operation], timeout=CALL_TIMEOUT_S, max_attempts=1
            )
        return bool(response.succeeded)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn the library's errors into ours."""
    try:
        yield
    except TimeoutError as error:
        raise StoreTimeout("etcd did not answer in time") from error
    except (EtcdError, grpc.RpcError) as error:
        raise StoreError(f"etcd call failed: {error}") from error
