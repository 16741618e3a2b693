"""The store, registrations and directories against a real etcd that is killed and compacted."""

import asyncio
import threading

import grpc.aio
import pytest
from etcd3aio.kv import KVService
from google.protobuf.message import Message

from benchmarks.faults.cell_run import forget_history
from services.common import etcd as etcd_module
from services.common.errors import StoreError
from services.common.etcd import SameCreation, Store, StoreSnapshot, Unchanged
from services.common.etcd_connection import EtcdMember
from services.common.membership import WORKERS, Directory, Registration
from services.common.records import encode_record
from tests.support.control_plane import (
    SHORT_LEASE_TTL_S,
    delete,
    open_store,
    put,
    registered,
    worker_record,
)
from tests.support.etcd_server import EtcdServer
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.common.v1 import record_pb2

KEY = f"{WORKERS}w0"


async def value_at(store: Store, key: str) -> bytes | None:
    entry = (await store.list_prefix(key)).get(key)
    return entry.value if entry is not None else None


async def holds(store: Store, record: Message) -> bool:
    return await value_at(store, KEY) == encode_record(record)


async def lease_lost(store: Store, registration: Registration) -> None:
    await store.revoke_lease(registration._lease)


class TestStore:
    async def test_put_if_is_a_compare_and_swap(self, store: Store) -> None:
        assert await store.put_if("a", b"1", 0)
        assert not await store.put_if("a", b"2", 0)
        entry = (await store.list_prefix("a"))["a"]
        assert await store.put_if("a", b"3", entry.mod_revision)
        assert not await store.put_if("a", b"4", entry.mod_revision)
        assert await value_at(store, "a") == b"3"

    async def test_a_deletion_keeps_a_successors_key(self, store: Store) -> None:
        await store.put_if("a", b"1", 0)
        first = (await store.list_prefix("a"))["a"]
        same = SameCreation("a", first.create_revision)
        assert await store.transact([same], {}, ["a"])
        await store.put_if("a", b"2", 0)
        assert not await store.transact([same], {}, ["a"])
        assert await value_at(store, "a") == b"2"

    async def test_a_transaction_compares_and_writes_atomically(self, store: Store) -> None:
        await store.put_if("a", b"1", 0)
        a = (await store.list_prefix("a"))["a"]
        right = [
            Unchanged("a", a.mod_revision),
            SameCreation("a", a.create_revision),
            Unchanged("b", 0),
        ]
        writes = {"a": b"2", "b": b"2"}
        for number, wrong in enumerate(
            [
                Unchanged("a", a.mod_revision + 1),
                SameCreation("a", a.create_revision + 1),
                Unchanged("b", 1),
            ]
        ):
            conditions = [*right[:number], wrong, *right[number + 1 :]]
            assert await store.transact(conditions, writes) == 0
            assert await value_at(store, "a") == b"1"
            assert await value_at(store, "b") is None
        revision = await store.transact(right, writes)
        snapshot = await store.snapshot("")
        assert {entry.mod_revision for entry in snapshot.entries.values()} == {revision}
        assert snapshot.revision == revision

    async def test_an_expired_lease_deletes_its_keys(self, store: Store) -> None:
        lease = await store.grant_lease(60)
        await store.put_if("a", b"1", 0, lease)
        assert await store.keep_alive(lease) == 60
        await store.revoke_lease(lease)
        assert await value_at(store, "a") is None
        assert await store.keep_alive(lease) == 0

    async def test_an_unreachable_etcd_is_reported_in_one_sentence(self) -> None:
        store = Store("http://127.0.0.1:9")
        with pytest.raises(StoreError, match=r"etcd at http://127.0.0.1:9 cannot be reached"):
            await store.connect(timeout_s=0.5)

    async def test_an_unknown_host_name_is_reported_in_one_sentence(self) -> None:
        store = Store("etcd.invalid:2379,127.0.0.1:9")
        with pytest.raises(StoreError, match="cannot be reached"):
            await store.connect(timeout_s=0.5)

    @pytest.mark.parametrize("form", ["http://{0}", "{0}", "http://{0}/, {0}", "localhost:{1}"])
    async def test_forms_of_the_url(self, etcd: EtcdServer, form: str) -> None:
        url = form.format(etcd.endpoint, etcd.endpoint.rpartition(":")[2])
        async with open_store(url) as store:
            assert await store.list_prefix("") == {}

    async def test_calls_time_out_and_recover(self, store: Store, etcd: EtcdServer) -> None:
        etcd.kill()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(StoreError):
                await store.put_if("a", b"1", 0)
            with pytest.raises(StoreError):
                await store.grant_lease(5)
            with pytest.raises(StoreError):
                await store.keep_alive(1)
        etcd.start()

        async def answers() -> bool:
            try:
                await store.list_prefix("")
            except StoreError:
                return False
            return True

        await eventually(answers)


class TestRegistration:
    async def test_the_key_lives_as_long_as_it_is_renewed(self, store: Store) -> None:
        async with registered(store, KEY, worker_record(), ttl_s=SHORT_LEASE_TTL_S):
            await asyncio.sleep(2.5 * SHORT_LEASE_TTL_S)
            await eventually(lambda: holds(store, worker_record()))
        assert await value_at(store, KEY) is None

    async def test_an_abandoned_key_expires_with_its_lease(self, store: Store) -> None:
        registration = Registration(store, KEY, worker_record(), SHORT_LEASE_TTL_S)
        task = asyncio.create_task(registration.run())
        await eventually(registration.registered.is_set)
        task.cancel()
        await asyncio.wait([task])

        async def gone() -> bool:
            return await value_at(store, KEY) is None

        await eventually(gone)

    async def test_a_successor_waits_for_the_predecessor(self, store: Store) -> None:
        async with registered(store, KEY, worker_record(incarnation="old"), ttl_s=30):
            record = worker_record(incarnation="new")
            successor = Registration(store, KEY, record, SHORT_LEASE_TTL_S)
            task = asyncio.create_task(successor.run())
            # Longer than its lease, so it must renew while it waits.
            await asyncio.sleep(1.5 * SHORT_LEASE_TTL_S)
            assert not successor.registered.is_set()
            assert await value_at(store, KEY) == encode_record(worker_record(incarnation="old"))
        await eventually(successor.registered.is_set)
        assert await value_at(store, KEY) == encode_record(record)
        task.cancel()
        await asyncio.wait([task])
        await successor.withdraw()

    async def test_a_record_can_be_updated(self, store: Store) -> None:
        later = worker_record(draining=True)
        # The lease outlasts a stall before the record is read.
        async with registered(store, KEY, worker_record(), ttl_s=10) as registration:
            await registration.update(later)
            assert await value_at(store, KEY) == encode_record(later)
            await lease_lost(store, registration)
            await eventually(lambda: holds(store, later))
        assert await value_at(store, KEY) is None

    async def test_a_lost_lease_is_replaced(self, store: Store) -> None:
        async with registered(store, KEY, worker_record(), ttl_s=SHORT_LEASE_TTL_S) as registration:
            before = (await store.list_prefix(KEY))[KEY]
            await lease_lost(store, registration)

            async def again() -> bool:
                entry = (await store.list_prefix(KEY)).get(KEY)
                return entry is not None and entry.create_revision > before.create_revision

            await eventually(again)
            await eventually(registration.registered.is_set)

    async def test_an_own_earlier_write_is_adopted(self, store: Store) -> None:
        """As after a put with a lost answer: the key is ours, but on another lease."""
        forgotten = await store.grant_lease(600)
        await store.put_if(KEY, encode_record(worker_record()), 0, forgotten)
        async with registered(store, KEY, worker_record()):
            await store.revoke_lease(forgotten)
            assert await value_at(store, KEY) is not None
        assert await value_at(store, KEY) is None

    async def test_a_process_registers_again_after_an_outage_longer_than_the_lease(
        self, store: Store, etcd: EtcdServer
    ) -> None:
        async with registered(store, KEY, worker_record(), ttl_s=SHORT_LEASE_TTL_S) as registration:
            etcd.kill()
            await eventually(lambda: not registration.registered.is_set())
            etcd.start()
            await eventually(registration.registered.is_set)
            # Also after the first lease, renewed by the restart, has expired.
            await asyncio.sleep(2.5 * SHORT_LEASE_TTL_S)
            await eventually(lambda: holds(store, worker_record()))
        assert await value_at(store, KEY) is None

    async def test_withdrawal_without_etcd_is_left_to_the_lease(
        self, store: Store, etcd: EtcdServer
    ) -> None:
        async with asyncio.timeout(DEADLINE_S):
            async with registered(store, KEY, worker_record()):
                etcd.kill()


class FollowedDirectory:
    """A directory of workers that runs during the body."""

    def __init__(self, store: Store) -> None:
        self.changes = 0
        self.directory = Directory(store, WORKERS, record_pb2.WorkerRecord, self._count)

    def _count(self) -> None:
        self.changes += 1

    async def __aenter__(self) -> "FollowedDirectory":
        self._task = asyncio.create_task(self.directory.run())
        await eventually(self.directory.loaded.is_set)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def shows(self, **records: Message) -> None:
        wanted = {f"{WORKERS}{name}": record for name, record in records.items()}
        await eventually(lambda: self.directory.records == wanted)


class SilentWatch:
    """A watch that never responds."""

    async def write(self, request: object) -> None:
        """Accept a request."""

    async def read(self) -> None:
        await asyncio.Event().wait()

    def cancel(self) -> None:
        """End the watch."""


class TestDirectory:
    async def test_follows_changes(self, store: Store) -> None:
        async with FollowedDirectory(store) as followed:
            await followed.shows()
            await put(store, KEY, worker_record())
            await followed.shows(w0=worker_record())
            await put(store, KEY, worker_record(incarnation="b"))
            await followed.shows(w0=worker_record(incarnation="b"))
            await delete(store, KEY)
            await followed.shows()
            assert followed.changes == 4

    async def test_ignores_invalid_records(self, store: Store) -> None:
        async with FollowedDirectory(store) as followed:
            values = [b"{", b"\xff\xfe", b"[1]", b'{"epoch": {}}', b"[" * 100_000]
            values.append(encode_record(worker_record("w0")))  # a record of another key
            for number, value in enumerate(values):
                await store.put_if(f"{WORKERS}bad{number}", value, 0)
            await put(store, KEY, worker_record())
            await followed.shows(w0=worker_record())

    async def test_the_newest_record_is_the_last_created(self, store: Store) -> None:
        async with FollowedDirectory(store) as followed:
            await put(store, f"{WORKERS}z", worker_record("z"))
            await put(store, f"{WORKERS}a", worker_record("a"))
            await put(store, f"{WORKERS}z", worker_record("z", incarnation="later"))
            await followed.shows(z=worker_record("z", incarnation="later"), a=worker_record("a"))
            assert followed.directory.newest(WORKERS) == worker_record("a")
            assert followed.directory.newest("none/") is None

    async def test_the_last_view_is_kept_while_etcd_is_unreachable(
        self, store: Store, etcd: EtcdServer
    ) -> None:
        await put(store, KEY, worker_record())
        async with FollowedDirectory(store) as followed:
            etcd.kill()
            await asyncio.sleep(2)
            assert followed.directory.records == {KEY: worker_record()}
            etcd.start()
            async with open_store(etcd.url) as fresh:
                await put(fresh, f"{WORKERS}w1", worker_record("w1"))
            await followed.shows(w0=worker_record(), w1=worker_record("w1"))

    async def test_recovers_after_a_compaction(
        self, store: Store, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wait = store._wait_for_change

        async def wait_late(prefix: str, revision: int) -> None:
            """Change and compact between the listing and its watch."""
            monkeypatch.setattr(store, "_wait_for_change", wait)
            for number in range(3):
                await put(store, KEY, worker_record(incarnation=f"i{number}"))
            latest = (await store.list_prefix(KEY))[KEY].mod_revision
            async with grpc.aio.insecure_channel(etcd.endpoint) as channel:
                await KVService(channel).compact(latest)
            await wait(prefix, revision)

        monkeypatch.setattr(store, "_wait_for_change", wait_late)
        monkeypatch.setattr(etcd_module, "RELIST_S", 1e6)
        async with FollowedDirectory(store) as followed:
            await followed.shows(w0=worker_record(incarnation="i2"))
            await put(store, KEY, worker_record(incarnation="after"))
            await followed.shows(w0=worker_record(incarnation="after"))

    async def test_sees_all_changes_during_repeated_compactions(
        self, store: Store, etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compactions may cause each watch to be refused at its start; at least one must be."""
        monkeypatch.setattr(etcd_module, "RELIST_S", 1e6)
        monkeypatch.setattr(etcd_module, "RETRY_S", 0.0)
        listings = 0
        snapshot = store.snapshot

        async def counted(prefix: str) -> StoreSnapshot:
            nonlocal listings
            listings += 1
            return await snapshot(prefix)

        monkeypatch.setattr(store, "snapshot", counted)
        over = threading.Event()

        def forget() -> None:
            while not over.is_set():
                forget_history(f"http://{etcd.endpoint}")

        forgetting = asyncio.create_task(asyncio.to_thread(forget))
        writes = 0
        try:
            async with FollowedDirectory(store) as followed, open_store(etcd.url) as writer:
                while listings <= writes + 1:  # one per change if no watch was refused
                    writes += 1
                    await put(writer, KEY, worker_record(incarnation=f"i{writes}"))
                    await followed.shows(w0=worker_record(incarnation=f"i{writes}"))
        finally:
            over.set()
            await forgetting

    async def test_recovers_from_a_silent_watch(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(EtcdMember, "open_watch", SilentWatch)
        monkeypatch.setattr(etcd_module, "RELIST_S", 0.2)
        async with FollowedDirectory(store) as followed:
            await put(store, KEY, worker_record())
            await followed.shows(w0=worker_record())
