"""etcd over TLS, with users and several clusters, against real servers."""

import asyncio
import datetime
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest

from services.common.errors import ConfigError, StoreError, StoreRefused
from services.common.etcd import Store, open_store
from services.common.etcd_connection import EtcdLogin
from services.common.membership import SERVICES, WORKERS, Directory, Registration
from services.common.tls import CertificateFiles
from services.scheduler.app import serve
from services.scheduler.config import SchedulerConfig
from tests.support.control_plane import LEASE_TTL_S, service_address, serving, worker_record
from tests.support.etcd_server import EtcdServer, running_etcd
from tests.support.etcd_users import enable_users
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.cli.certificates import Authority, write_pair
from tideserve.common.v1 import record_pb2

pytestmark = pytest.mark.cluster
PREFIXES = {"one": "/one/", "two": "/two/"}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.create("test")


@pytest.fixture(scope="module")
def etcd(authority: Authority) -> Iterator[EtcdServer]:
    """An etcd with TLS and a user per prefix, whose password is its name."""
    with running_etcd(authority) as server:
        asyncio.run(enable_users(server, PREFIXES))
        yield server


def config_of(etcd: EtcdServer, user: str, **changes: object) -> SchedulerConfig:
    fields = {
        "etcd_url": etcd.url,
        "etcd_prefix": PREFIXES[user],
        "etcd_user": user,
        "etcd_password": user,
        "etcd_ca_file": etcd.ca_file,
        "lease_ttl_s": LEASE_TTL_S,
    }
    return SchedulerConfig(**(fields | changes))


async def test_clusters_on_a_shared_etcd_are_isolated(etcd: EtcdServer) -> None:
    """Two real schedulers, each with a worker, with equal names."""
    async with AsyncExitStack() as stack:
        seen = {}
        for user in PREFIXES:
            config = config_of(etcd, user)
            store = open_store(config)
            await store.connect(DEADLINE_S)
            stack.push_async_callback(store.close)
            await stack.enter_async_context(serving(serve, config))
            address = await service_address(store, "scheduler")
            record = worker_record("w0", address=f"{user}:1")
            registration = Registration(store, f"{WORKERS}w0", record, LEASE_TTL_S)
            registering = asyncio.create_task(registration.run())
            stack.callback(registering.cancel)
            directory = Directory(store, WORKERS, record_pb2.WorkerRecord)
            following = asyncio.create_task(directory.run())
            stack.callback(following.cancel)
            async with asyncio.timeout(DEADLINE_S):
                await registration.registered.wait()
                await directory.wait_for(lambda d=directory: bool(d.records))
            seen[user] = (store, directory, address, record)
        assert len({address for _, _, address, _ in seen.values()}) == 2
        for store, directory, address, record in seen.values():
            assert directory.records == {f"{WORKERS}w0": record}
            keys = list(await store.list_prefix(""))
            assert [key.split("/")[0] for key in keys] == ["services", "workers"]
            (service,) = (await store.list_prefix(SERVICES)).values()
            assert address.encode() in service.value


async def test_a_user_without_access_to_the_prefix_is_reported_in_one_sentence(
    etcd: EtcdServer,
) -> None:
    store = open_store(config_of(etcd, "one", etcd_prefix="/two/"))
    with pytest.raises(StoreRefused, match=r"user 'one' \(permission denied\); grant its role"):
        await store.connect()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"etcd_password": "wrong"}, "refuses user 'one' .*; correct 'etcd_user'"),
        ({"etcd_user": None, "etcd_password": None}, "a call without user .*; set 'etcd_user'"),
    ],
)
async def test_a_refused_user_is_reported_at_once_in_one_sentence(
    etcd: EtcdServer, changes: dict[str, object], sentence: str
) -> None:
    store = open_store(config_of(etcd, "one", **changes))
    with pytest.raises(StoreRefused, match=sentence):
        await store.connect()


async def test_an_expired_token_is_renewed(etcd: EtcdServer) -> None:
    """A restart of etcd invalidates all tokens."""
    store = open_store(config_of(etcd, "one"))
    await store.connect(DEADLINE_S)
    assert (await store.status()).version.startswith("3.")
    lease = await store.grant_lease(60)
    etcd.kill()
    etcd.start()

    async def renewed() -> bool:
        try:
            return await store.keep_alive(lease) > 0
        except StoreRefused:
            raise
        except StoreError:
            return False

    await eventually(renewed)
    assert await store.put_if("a", b"1", 0, lease)
    await store.revoke_lease(lease)
    await store.close()


async def test_an_etcd_of_another_ca_is_not_trusted(etcd: EtcdServer, tmp_path: Path) -> None:
    other = tmp_path / "ca.pem"
    other.write_bytes(Authority.create("other").files.cert)
    store = open_store(config_of(etcd, "one", etcd_ca_file=other))
    with pytest.raises(StoreError, match=r"cannot be reached; .* 'etcd_ca_file'"):
        await store.connect(timeout_s=0.5)


@pytest.fixture
def members() -> Iterator[list[EtcdServer]]:
    """Two independent etcds, so that answers can be attributed."""
    with ExitStack() as stack:
        yield [stack.enter_context(running_etcd()) for _ in range(2)]


async def test_another_endpoint_is_used_when_the_first_is_down(members: list[EtcdServer]) -> None:
    store = Store(",".join(member.url for member in members))
    await store.connect(DEADLINE_S)
    assert await store.put_if("a", b"1", 0)
    members[0].kill()
    # A listing succeeds, as it is retried at the other endpoint.
    assert await store.list_prefix("a") == {}
    assert await store.put_if("a", b"2", 0)
    members[1].kill()
    members[0].start()

    async def listed() -> bytes:
        # The channel may still be connecting to the stopped endpoint.
        try:
            return (await store.list_prefix("a"))["a"].value
        except StoreError as error:
            assert "UNAVAILABLE" in str(error)
            return b""

    assert await eventually(listed) == b"1"
    await store.close()


async def test_new_certificates_are_used_without_a_failed_call(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with running_etcd(authority) as server:
        write_pair(tmp_path, "one", authority.issue("one", (), datetime.timedelta(days=1)))
        files = CertificateFiles(
            "etcd", server.ca_file, tmp_path / "one.pem", tmp_path / "one-key.pem"
        )
        store = Store(server.url, login=EtcdLogin(files=files))
        await store.connect(DEADLINE_S)
        first = await store._connection.member()
        follower = store.follow_prefix("")
        await anext(follower)
        write_pair(tmp_path, "one", authority.issue("one", (), datetime.timedelta(days=1)))
        assert await store.put_if("a", b"1", 0)
        assert await store._connection.member() is not first
        assert (await anext(follower)).entries["a"].value == b"1"
        await follower.aclose()
        await store.close()
    assert "reloaded the certificates of 'etcd_cert_file'" in caplog.text


def test_certificates_without_tls_are_refused(etcd: EtcdServer) -> None:
    with pytest.raises(ConfigError, match="not encrypted; write https://"):
        open_store(config_of(etcd, "one", etcd_url="http://127.0.0.1:1"))
