"""Transactions run in order, share a commit in groups, and fail without harm."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, text

from services.common.errors import ConfigError
from services.gateway.batches import database as module
from services.gateway.batches import schema
from services.gateway.batches.database import Database
from services.gateway.batches.errors import BatchStoreDown, NoSuchEntry, no_such_file
from services.gateway.batches.store import BatchStore
from tests.support.batch_store import OWNER, new_file
from tests.support.postgres_server import PostgresServer


class Observed:
    """A database that records all transactions."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []

    def __call__(self, name: str, seconds: float, failed: bool) -> None:
        self.calls.append((name, failed))


async def test_calls_of_a_group_share_a_transaction(tmp_path: Path) -> None:
    observed = Observed()
    database = Database(f"sqlite:///{tmp_path}/x.db", observed)
    sizes: list[int] = []

    def double(connection: Connection, numbers: Any) -> list[int]:
        sizes.append(len(numbers))
        return [2 * number for number in numbers]

    calls = [database.write_grouped("double", double, "key", n) for n in range(150)]
    other = database.write_grouped("double", double, "other key", 1000)
    assert await asyncio.gather(*calls, other) == [2 * n for n in [*range(150), 1000]]
    assert max(sizes) == module.GROUP_MAX and len(sizes) <= 5
    assert observed.calls == [("double", False)] * len(sizes)
    await database.close()


async def test_an_error_of_the_call_is_raised_and_undone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/x.db", Observed())

    def create(connection: Connection) -> None:
        connection.execute(text("CREATE TABLE t (x)"))
        raise no_such_file("file-1")

    def count(connection: Connection) -> int:
        return int(connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one())

    before = await database.write("count", count)
    with pytest.raises(NoSuchEntry):
        await database.write("create", create)
    assert await database.read("count", count) == before
    await database.close()


async def test_a_failure_of_the_database_is_503_and_passes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observed = Observed()
    database = Database(f"sqlite:///{tmp_path}/x.db", observed)

    def fail(connection: Connection) -> None:
        connection.execute(text("SELECT secret FROM nowhere"))

    with caplog.at_level("INFO"):
        for _ in range(2):
            with pytest.raises(BatchStoreDown) as raised:
                await database.write("fail", fail)
        await database.write("work", lambda connection: None)
    assert raised.value.status == 503 and raised.value.retry_s is not None
    assert "nowhere" not in raised.value.message
    assert [failed for _, failed in observed.calls] == [True, True, False]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    await database.close()


async def test_waiting_calls_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CALLS_MAX", 2)
    database = Database(f"sqlite:///{tmp_path}/x.db", Observed())
    begun, go_on = threading.Event(), threading.Event()

    def wait(connection: Connection) -> None:
        begun.set()
        go_on.wait(30)

    running = asyncio.create_task(database.write("wait", wait))
    await asyncio.to_thread(begun.wait, 30)
    waiting = [asyncio.create_task(database.write("w", lambda c: None)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(BatchStoreDown):
        await database.write("w", lambda connection: None)
    go_on.set()
    await asyncio.gather(running, *waiting)
    await database.close()
    with pytest.raises(BatchStoreDown):
        await database.write("w", lambda connection: None)


async def test_a_full_disk_pauses_writes_and_not_reads(tmp_path: Path) -> None:
    store = BatchStore(f"sqlite:///{tmp_path}/x.db")
    await store.lead(1)
    pages = await store._database.write(
        "limit", lambda c: c.execute(text("PRAGMA max_page_count=1")).scalar_one()
    )
    assert pages > 1, "SQLite keeps the present size as the limit"
    with pytest.raises(BatchStoreDown):
        for _ in range(1000):
            await store.files.add(new_file())
    files, _ = await store.files.page(OWNER)
    assert files
    await store._database.write("limit", lambda c: c.execute(text("PRAGMA max_page_count=100000")))
    await store.files.add(new_file())
    await store.close()


async def test_a_server_that_ends_and_returns(postgres: PostgresServer) -> None:
    store = BatchStore(postgres.url)
    await store.lead(1)
    postgres.kill()
    with pytest.raises(BatchStoreDown):
        await store.lead(2)
    with pytest.raises(BatchStoreDown):
        await store.open()
    postgres.start()
    await store.lead(3)
    await store.open()
    await store.close()


def modes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


async def test_the_files_of_sqlite_are_private(tmp_path: Path) -> None:
    store = BatchStore(f"sqlite:///{tmp_path}/x.db")
    await store.lead(1)
    assert modes_in(tmp_path) == {"x.db": 0o600, "x.db-wal": 0o600, "x.db-shm": 0o600}
    await store.close()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nonsense", "not a URL"),
        ("sqlite://", "names no file"),
        ("mysql://host/db", "use sqlite or postgresql"),
        ("sqlite:////no/such/folder/x.db", "create its folder"),
    ],
)
def test_an_unusable_url_is_refused(url: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        BatchStore(url)


def test_sqlite_on_a_shared_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\n"
    monkeypatch.setattr(schema, "_mounts", lambda: mounts)
    with pytest.raises(ConfigError, match="nfs4"):
        BatchStore(f"sqlite:///{tmp_path}/x.db")


async def test_tables_of_another_version_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/x.db"
    store = BatchStore(url)
    await store.lead(1)
    await store.close()
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 99)
    store = BatchStore(url)
    with pytest.raises(ConfigError, match="version 1"):
        await store.lead(2)
    await store.close()
