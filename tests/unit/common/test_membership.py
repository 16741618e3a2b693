"""A live view of records reads only changed ones."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from services.common import membership
from services.common.errors import StoreError
from services.common.etcd import Entry, Listing, Store, StoreSnapshot
from services.common.membership import WORKERS, Directory, Registration
from services.common.records import encode_record
from tideserve.common.v1 import record_pb2


class Listings:
    """A store that returns these listings in order."""

    def __init__(self, *listings: Listing) -> None:
        self._listings = listings

    async def follow_prefix(self, prefix: str) -> AsyncIterator[StoreSnapshot]:
        for number, listing in enumerate(self._listings):
            yield StoreSnapshot(listing, number)


def entry(worker_id: str, revision: int, incarnation: str = "i") -> Entry:
    record = record_pb2.WorkerRecord(worker_id=worker_id, incarnation=incarnation)
    return Entry(encode_record(record), 1, revision)


async def test_a_change_of_a_record_reads_only_that_record(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = membership.read_record

    def noting(kind: Any, key: str, value: bytes) -> Any:
        read.append(key)
        return real(kind, key, value)

    monkeypatch.setattr(membership, "read_record", noting)
    first = {"a": entry("a", 2), "b": entry("b", 3), "bad": Entry(b"\xff", 1, 4)}
    second = first | {"b": entry("b", 5, "later"), "c": entry("c", 6)}
    third = {name: entry for name, entry in second.items() if name != "a"}
    store = cast(Store, Listings(first, second, third, first))
    directory = Directory(store, WORKERS, record_pb2.WorkerRecord)
    await directory.run()
    assert read == ["a", "b", "bad", "b", "c", "a", "b"]
    assert {key: record.incarnation for key, record in directory.records.items()} == {
        "a": "i",
        "b": "i",
    }


class AwayStore:
    """A store that has granted a lease and does not respond after that."""

    async def keep_alive(self, lease: int) -> int:
        raise StoreError("etcd does not answer")


async def test_a_lease_is_lost_no_later_than_its_expiry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an outage others wait only a moment for workers to register again."""
    now_s = 100.0

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds > 0
        now_s += seconds + 3.0  # the call that follows takes as long as a call may

    monkeypatch.setattr(membership, "monotonic_s", lambda: now_s)
    monkeypatch.setattr(membership.asyncio, "sleep", sleep)
    record = record_pb2.WorkerRecord(worker_id="a", incarnation="i")
    registration = Registration(cast(Store, AwayStore()), f"{WORKERS}a", record, 60)
    await registration._renew()
    assert now_s <= 100.0 + 60.0 + 3.0
