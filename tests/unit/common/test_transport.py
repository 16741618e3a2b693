"""Certificates that change while a server runs: streams continue, new connections use them."""

import asyncio
import ssl
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.errors import ConfigError
from services.common.grpc_server import ProcessServicer, Server
from services.common.probe import main
from services.common.transport import Transport, transport_of
from services.scheduler.config import SchedulerConfig
from tests.support.certified import Certified
from tideserve.cli.certificates import Authority

TIMEOUT_S = 20.0


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    certified = Certified(tmp_path)
    for role in ("gateway", "worker"):
        certified.issue(role)
    return certified


async def served_certificate(certified: Certified, address: str) -> str:
    """The certificate (PEM) of a server for a new connection, made with the gateway's pair."""
    files = certified.files("gateway")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.cert, files.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    name = "worker.tideserve.internal"
    _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname=name)
    try:
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.transport.abort()
    return ssl.DER_cert_to_PEM_cert(shown)


async def healthy(client: Transport, address: str) -> bool:
    async with client.dial(address, "worker") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_certificates_rotate_below_an_open_stream(certified: Certified) -> None:
    """First the leaves, then the CA through a bundle, as the page on security describes."""
    ready = True
    process = ProcessServicer("worker", list, lambda: ready)
    transport = certified.transport("worker")
    server = Server("127.0.0.1", 0, process, ["a.Service"], transport=transport)
    await server.start()
    client = certified.transport("gateway")
    async with asyncio.timeout(TIMEOUT_S), client.dial(server.address, "worker") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="a.Service")
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING

        for role in ("gateway", "worker"):
            certified.issue(role)
        new = (certified.folder / "worker.pem").read_text()
        assert await served_certificate(certified, server.address) == new
        assert await healthy(client, server.address)

        successor = Authority.create("successor")
        certified.trust(certified.authority, successor)
        assert await healthy(client, server.address)
        certified.issue("gateway", successor)
        assert await healthy(client, server.address)
        certified.issue("worker", successor)
        assert await healthy(client, server.address)
        certified.trust(successor)
        assert await healthy(client, server.address)

        # The stream opened at first still delivers changes.
        ready = False
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()

    # Certificates of the former CA are refused from now on.
    certified.issue("gateway", certified.authority)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await healthy(client, server.address)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


def test_unusable_certificates_are_a_short_error(certified: Certified) -> None:
    fields = certified.config("worker") | {"tls_key_file": certified.folder / "gateway-key.pem"}
    with pytest.raises(ConfigError, match=r"'tls_key_file' .* give a matching pair"):
        transport_of(SchedulerConfig(etcd_url="a:1", **fields))


@pytest.mark.parametrize("left_out", ["tls_ca_file", "tls_cert_file", "tls_key_file"])
def test_an_incomplete_set_of_files_is_a_short_error(certified: Certified, left_out: str) -> None:
    fields = certified.config("worker")
    del fields[left_out]
    with pytest.raises(ConfigError, match="mutual TLS needs all three"):
        SchedulerConfig(etcd_url="a:1", **fields)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["/tideserve.worker.v1.WorkerService"], 0),
        (["", "--role", "worker"], 0),
        (["", "--role", "memmgr"], 1),
        (["/tideserve.memmgr.v1.MemmgrService"], 1),
        ([""], 1),
    ],
)
async def test_a_probe_shows_the_service_its_own_certificate(
    certified: Certified, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int
) -> None:
    for name, path in certified.config("worker").items():
        monkeypatch.setenv(f"TIDESERVE__{name.upper()}", str(path))
    process = ProcessServicer("worker", list, lambda: True)
    names = ["tideserve.worker.v1.WorkerService"]
    server = Server("127.0.0.1", 0, process, names, transport=certified.transport("worker"))
    await server.start()
    url, *rest = arguments
    assert await asyncio.to_thread(main, [f"grpc://{server.address}{url}", *rest]) == code
    await server.stop(0)
