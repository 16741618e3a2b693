"""The store on SQLite and, where it is installed, on a real PostgreSQL server."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.gateway.batches import database
from services.gateway.batches.store import BatchStore
from tests.support.postgres_server import PostgresServer, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The URL of an empty database."""
    # A test calls one after the other: nothing joins the first call of a group.
    monkeypatch.setattr(database, "GROUP_WAIT_S", 0.001)
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/batches.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    server.clear()
    return server.url


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[BatchStore]:
    opened = BatchStore(store_url)
    yield opened
    await opened.close()
