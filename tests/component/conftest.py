"""Fixtures of tests against real processes."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.common.etcd import Store
from tests.support.control_plane import open_store, wipe
from tests.support.etcd_server import EtcdServer, running_etcd
from tests.support.gateway import Case, gateway_case


@pytest.fixture(scope="module")
def shared_etcd() -> Iterator[EtcdServer]:
    """One etcd for the tests of a module; use `etcd`, which empties it."""
    with running_etcd() as server:
        yield server


@pytest.fixture
async def etcd(shared_etcd: EtcdServer) -> EtcdServer:
    """A running, empty etcd; a test may kill it, as the next test restarts it."""
    if not shared_etcd.running:
        shared_etcd.start()
    async with open_store(shared_etcd.url) as store:
        await wipe(store)
    return shared_etcd


@pytest.fixture
async def store(etcd: EtcdServer) -> AsyncIterator[Store]:
    """A connection to `etcd`."""
    async with open_store(etcd.url) as store:
        yield store


@pytest.fixture
async def case(request: pytest.FixtureRequest, store: Store, tmp_path: Path) -> AsyncIterator[Case]:
    """A gateway in front of fakes, configured by the closest mark `gateway`."""
    mark = request.node.get_closest_marker("gateway")
    async with gateway_case(store, tmp_path / "model", **(mark.kwargs if mark else {})) as case:
        yield case
