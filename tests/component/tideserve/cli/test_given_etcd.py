"""An external etcd must answer and must not already hold a cluster."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.etcd import Store
from services.common.membership import GROUPS, SERVICES, WORKERS
from tests.support.etcd_server import EtcdServer, running_etcd
from tideserve.cli.errors import EXIT_UNUSABLE, CommandError
from tideserve.cli.etcd_process import check_given_etcd, claim_given_etcd, release_given_etcd

pytestmark = pytest.mark.cluster


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with running_etcd() as server:
        yield server


def put(url: str, key: str) -> int:
    """Write a key on a new lease; returns the lease."""

    async def write() -> int:
        store = Store(url)
        await store.connect()
        lease = await store.grant_lease(60)
        await store.put_if(key, b"{}", 0, lease)
        await store.close()
        return lease

    return asyncio.run(write())


def revoke(url: str, lease: int) -> None:
    async def end() -> None:
        store = Store(url)
        await store.connect()
        await store.revoke_lease(lease)
        await store.close()

    asyncio.run(end())


def test_a_second_cluster_is_refused_until_the_first_has_stopped(etcd: EtcdServer) -> None:
    put(etcd.url, f"{GROUPS}group-worker-0")
    put(etcd.url, "/another/users/key")
    check_given_etcd({"etcd_url": etcd.url})
    for key in (f"{SERVICES}gateway/abc", f"{WORKERS}worker-0"):
        lease = put(etcd.url, key)
        with pytest.raises(CommandError, match=f"another cluster uses .*{key}.* stop it") as raised:
            check_given_etcd({"etcd_url": etcd.url})
        assert raised.value.exit_code == EXIT_UNUSABLE
        revoke(etcd.url, lease)
        check_given_etcd({"etcd_url": etcd.url})


def test_another_prefix_is_another_cluster(etcd: EtcdServer) -> None:
    put(etcd.url, f"{WORKERS}worker-0")
    check_given_etcd({"etcd_url": etcd.url, "etcd_prefix": "/another/"})


def test_a_password_may_be_in_a_file(etcd: EtcdServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    access = {"etcd_user": "me", "etcd_password_file": str(tmp_path / "password")}
    # The login is attempted, but this etcd has no users.
    with pytest.raises(CommandError, match=r"refuses user 'me' .* or remove 'etcd_user'"):
        check_given_etcd({"etcd_url": etcd.url, **access})


def test_only_one_of_simultaneously_started_clusters_is_accepted(etcd: EtcdServer) -> None:
    access = {"etcd_url": etcd.url}
    check_given_etcd(access)
    lease = claim_given_etcd(access)
    with pytest.raises(CommandError, match=r"another cluster is being started .*process \d+ on"):
        claim_given_etcd(access)
    claim_given_etcd(access | {"etcd_prefix": "/another/"})
    # Once it has registered, its claim may expire.
    put(etcd.url, f"{SERVICES}scheduler/abc")
    release_given_etcd(access, lease)
    for _ in range(2):
        with pytest.raises(CommandError, match="another cluster uses the etcd"):
            claim_given_etcd(access)


def test_a_released_claim_can_be_made_again(etcd: EtcdServer) -> None:
    access = {"etcd_url": etcd.url}
    release_given_etcd(access, claim_given_etcd(access))
    lease = claim_given_etcd(access)
    etcd.kill()
    release_given_etcd(access, lease)
