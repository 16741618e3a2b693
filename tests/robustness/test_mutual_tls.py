"""A whole cluster with mutual TLS, including etcd, changes certificates and CA under load."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.etcd import Store
from services.common.etcd_connection import EtcdLogin
from services.common.grpc_client import open_channel
from services.common.membership import SERVICES, WORKERS
from services.common.records import decode_record
from services.common.role import SERVICE_ROLES
from services.common.tls import CertificateFiles
from tests.support.certified import Certified
from tests.support.client import numbered_completion
from tests.support.cluster import Cluster
from tests.support.etcd_server import EtcdServer, running_etcd
from tests.support.etcd_users import enable_users
from tests.support.tiny_models import make_tiny_model
from tests.support.waiting import eventually
from tideserve.cli.certificates import Authority
from tideserve.cli.groups import drop, restore
from tideserve.common.v1 import record_pb2

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

PREFIX = "/secured/"
USER = "secured"
STREAMS = 4
TIMEOUT_S = 10.0


@dataclass
class Secured:
    """The cluster, its certificates and its shared etcd."""

    cluster: Cluster
    certified: Certified
    etcd: EtcdServer


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    model = make_tiny_model(tmp_path_factory.mktemp("model"), seed=7)
    certified = Certified(tmp_path_factory.mktemp("certificates"))
    for role in SERVICE_ROLES:
        certified.issue(role)
    with running_etcd(certified.authority) as etcd:
        asyncio.run(enable_users(etcd, {USER: PREFIX}))
        shared = {
            "etcd_ca_file": str(etcd.ca_file),
            "etcd_user": USER,
            "etcd_password": USER,
            "etcd_prefix": PREFIX,
        }
        sections = {role: plain(certified.config(role)) for role in SERVICE_ROLES}
        # The scheduler killed below restarts more slowly than clients would wait by default.
        sections["gateway"]["admit_timeout_s"] = 60.0
        with Cluster(
            model, memory="32MiB", dtype="float64", etcd=etcd.url, services=shared, **sections
        ) as cluster:
            yield Secured(cluster, certified, etcd)


def plain(config: dict[str, object]) -> dict[str, object]:
    """Convert paths to strings for YAML."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in config.items()}


@dataclass
class Load:
    """Concurrent loops of streams, and the outputs by number."""

    url: str
    answers: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    finished: int = 0

    async def run(self, stop: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(STREAMS):
                tasks.create_task(self._repeat(number, stop))

    async def _repeat(self, number: int, stop: asyncio.Event) -> None:
        while not stop.is_set():
            answer = await numbered_completion(self.url, number, prompt_tokens=30, max_tokens=60)
            assert answer.completion_tokens == 60
            self.answers[number].add(answer.text)
            self.finished += 1

    async def some_more(self) -> None:
        """Wait until each loop has started another stream."""
        wanted = self.finished + 2 * STREAMS

        async def there() -> bool:
            return self.finished >= wanted

        await eventually(there)


async def test_certificates_and_the_ca_change_without_a_failed_request(secured: Secured) -> None:
    cluster, certified = secured.cluster, secured.certified
    load, stop = Load(cluster.url), asyncio.Event()
    first, second = certified.authority, Authority.create("second")
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(load.run(stop))
        await load.some_more()
        for trusted, issuer in (
            ((first,), first),
            ((first, second), second),
            ((second,), second),
        ):
            certified.trust(*trusted)
            for role in SERVICE_ROLES:
                certified.issue(role, issuer)
            # Each change of groups opens new connections; a new scheduler causes all to reconnect.
            await asyncio.to_thread(drop, cluster.admin_url, None, ())
            await load.some_more()
            await asyncio.to_thread(restore, cluster.admin_url, None, "")
            pid = cluster.kill("scheduler")
            await asyncio.to_thread(cluster.wait_for_restart, "scheduler", pid)
            await load.some_more()
        stop.set()
    assert load.finished >= 14 * STREAMS
    assert {number: len(texts) for number, texts in load.answers.items()} == dict.fromkeys(
        range(STREAMS), 1
    )
    await all_services_refuse_the_former_ca(secured, first)


async def all_services_refuse_the_former_ca(secured: Secured, former: Authority) -> None:
    """Check also that callers without a certificate are refused."""
    certified = secured.certified
    dial = certified.transport("gateway").dial

    async def answering() -> list[tuple[str, str]]:
        """All instances, once only live ones are registered."""
        services = await registered(secured.etcd)
        health = [await health_of(dial(address, role)) for role, address in services]
        return services if set(health) == {None} else []

    addresses = await eventually(answering)
    assert {role for role, _ in addresses} == set(SERVICE_ROLES)
    certified.issue("gateway", former, name="former")
    for role, address in addresses:
        refused = [certified.transport("former").dial(address, role), open_channel(address)]
        for channel in refused:
            assert await health_of(channel) is grpc.StatusCode.UNAVAILABLE


async def registered(etcd: EtcdServer) -> list[tuple[str, str]]:
    """Role and address of every service of the cluster."""
    login = EtcdLogin(USER, USER, CertificateFiles("etcd", etcd.ca_file))
    store = Store(etcd.url, PREFIX, login)
    try:
        services = await store.list_prefix(SERVICES)
        workers = await store.list_prefix(WORKERS)
    finally:
        await store.close()
    addresses = []
    for entry in services.values():
        record = decode_record(record_pb2.ServiceRecord, entry.value)
        addresses.append((record.name, record.address))
    for entry in workers.values():
        addresses.append(("worker", decode_record(record_pb2.WorkerRecord, entry.value).address))
    return addresses


async def health_of(channel: grpc.aio.Channel) -> grpc.StatusCode | None:
    """None if the service answers; closes the channel."""
    async with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return None
