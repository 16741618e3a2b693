"""`tideserve doctor` names the cause of these broken set-ups.

etcd, gRPC servers, certificates and sockets are real; parts that would need a whole cluster are
records or simple HTTP servers.
"""

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.etcd import Store
from services.common.grpc_server import ProcessServicer, Server
from services.common.membership import GROUPS, LEADERS, SERVICES, WORKERS
from services.common.service_config import ServiceConfig
from services.common.tls import CertificateFiles
from services.core.quota.limits import QuotaLimits
from tests.support.certified import DAY, Certified
from tests.support.control_plane import put, registered, worker_in_group, worker_record
from tests.support.etcd_server import EtcdServer
from tests.support.fake_openai import fake_openai
from tests.support.refusing_address import refusing_address
from tideserve.cli.cluster_folder import ClusterFolder
from tideserve.cli.doctor.addresses import SERVICE
from tideserve.cli.doctor.etcd import QUOTA, SIZE, judge
from tideserve.cli.doctor.finding import Finding, Level
from tideserve.cli.doctor.keys import check_keys
from tideserve.cli.doctor.machine import ProcessLimits, check_limits
from tideserve.cli.doctor.run import (
    DoctorTarget,
    examine,
    run_doctor,
    target_of_folder,
    target_of_options,
)
from tideserve.cli.errors import CommandError
from tideserve.cli.keys import add_key
from tideserve.common.v1 import record_pb2


class World:
    """The parts of a healthy cluster, of which a test breaks one."""

    def __init__(self, store: Store, url: str, stack: AsyncExitStack) -> None:
        self.store = store
        self.url = url
        self.stack = stack
        self.ready = dict.fromkeys((*SERVICE, "w0", "w1"), True)
        self.lane = ""

    async def serve(self, name: str, role: str) -> str:
        """A real gRPC server with the health of a role; returns its address."""
        process = ProcessServicer(name, list, lambda: self.ready[name])
        server = Server("127.0.0.1", 0, process, health_names=[SERVICE[role]])
        await server.start()
        self.stack.push_async_callback(server.stop, 0)
        return f"127.0.0.1:{server.port}"

    async def worker(self, name: str, **changes: Any) -> None:
        """A registered worker in a group."""
        fields = {
            "address": await self.serve(name, "worker"),
            "activation_address": self.lane,
            "bulk_address": self.lane,
            "model_digest": "a" * 64,
            "protocol_version": 1,
            "code_digest": "c" * 64,
        }
        record = worker_record(name, **(fields | changes))
        await self.stack.enter_async_context(worker_in_group(self.store, record))

    async def service(self, name: str, **changes: Any) -> None:
        """A registered service."""
        fields = {"name": name, "incarnation": "a", "address": await self.serve(name, name)}
        record = record_pb2.ServiceRecord(**(fields | changes))
        await self.stack.enter_async_context(registered(self.store, f"{SERVICES}{name}/a", record))
        if name == "memmgr":
            await put(self.store, f"{LEADERS}memmgr", record)

    async def all_but(self, *left_out: str) -> None:
        """Register all other parts of a healthy cluster."""
        for name in ("gateway", "scheduler", "memmgr"):
            if name not in left_out:
                await self.service(name)
        for name in ("w0", "w1"):
            if name not in left_out:
                await self.worker(name)

    async def examine(self, **fields: Any) -> list[Finding]:
        """The doctor's findings."""
        config = ServiceConfig(**({"etcd_url": self.url} | fields))
        return await examine(DoctorTarget(services=config))


@pytest.fixture
async def world(store: Store, etcd: EtcdServer) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        made = World(store, etcd.url, stack)
        lane = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        stack.callback(lane.close)
        made.lane = f"127.0.0.1:{lane.sockets[0].getsockname()[1]}"
        yield made


def wrong(findings: list[Finding], level: Level = Level.FAILURE) -> list[str]:
    return [finding.sentence for finding in findings if finding.level is level]


async def test_nothing_is_wrong(world: World) -> None:
    await world.all_but()
    findings = await world.examine()
    assert wrong(findings) == []
    sentences = [finding.sentence for finding in findings if finding.level is Level.OK]
    assert any(
        "is version" in finding.sentence for finding in findings if finding.check == "etcd"
    ), findings
    assert "2 workers and 3 services are registered and consistent" in sentences
    assert "5 services and 4 lanes are reachable from here" in sentences


async def test_a_user_who_reaches_only_the_gateway_is_informed() -> None:
    with refusing_address() as address:
        findings = await examine(DoctorTarget(url=f"http://{address}"))
    (sentence,) = wrong(findings, Level.WARNING)
    assert sentence.startswith("only the gateway was checked; for the whole")


async def test_1_etcd_is_unreachable() -> None:
    with refusing_address() as address:
        findings = await examine(DoctorTarget(services=ServiceConfig(etcd_url=f"http://{address}")))
    (sentence,) = wrong(findings)
    assert "cannot be reached; start it, or correct its URL" in sentence


async def test_2_the_prefix_differs(world: World) -> None:
    await world.all_but()
    (sentence,) = wrong(await world.examine(etcd_prefix="/other/"))
    assert (
        "no services are registered under /other/" in sentence and "correct the prefix" in sentence
    )


async def test_3_a_service_is_missing(world: World) -> None:
    await world.all_but("scheduler")
    (sentence,) = wrong(await world.examine())
    assert "no scheduler is registered" in sentence


async def test_4_an_address_is_unreachable(world: World) -> None:
    await world.all_but("w1")
    await world.worker("w1", activation_address="0.0.0.0:50061")
    sentences = wrong(await world.examine())
    assert "a lane of the worker w1 is registered at 0.0.0.0:50061" in sentences[0]
    assert "set its 'advertise'" in sentences[0]


async def test_4_services_listen_on_loopback_only(world: World) -> None:
    await world.all_but("w1")
    await world.worker("w1", activation_address="192.0.2.7:50061", bulk_address="192.0.2.7:50062")
    findings = wrong(await world.examine())
    alone = [
        sentence for sentence in findings if "which only its own machine can reach" in sentence
    ]
    assert any(
        sentence.startswith("the scheduler is registered at 127.0.0.1:") for sentence in alone
    )
    assert not any("192.0.2.7" in sentence for sentence in alone)


async def test_4_an_unknown_record_is_named(world: World) -> None:
    await world.all_but()
    await put(world.store, f"{WORKERS}w2", worker_record("w3"))
    await put(world.store, f"{GROUPS}g", record_pb2.GroupRecord(group_id="g", epoch=1))
    first, second = wrong(await world.examine())
    assert f"the record {WORKERS}w2 under" in first and f"the record {GROUPS}g under" in second
    assert "every service ignores it" in first


async def test_5_workers_hold_different_models(world: World) -> None:
    await world.all_but("w1")
    await world.worker("w1", model_digest="b" * 64)
    (sentence,) = wrong(await world.examine())
    assert "different parameters" in sentence and "w0: aaaaaaaaaaaa, w1: bbbbbbbbbbbb" in sentence


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol_version": 2}, "different protocol versions (w0: 1, w1: 2)"),
        ({"code_digest": "d" * 64}, "run different code"),
    ],
)
async def test_6_an_update_is_not_finished(
    world: World, change: dict[str, Any], message: str
) -> None:
    await world.all_but("w1")
    await world.worker("w1", **change)
    (sentence,) = wrong(await world.examine())
    assert message in sentence and "finish the update" in sentence


async def test_7_a_service_cannot_be_reached(world: World) -> None:
    await world.all_but("memmgr")
    with refusing_address() as address:
        await world.service("memmgr", address=address)
        (sentence,) = wrong(await world.examine())
    assert f"the memmgr cannot be reached at {address} (UNAVAILABLE)" in sentence
    assert "firewall" in sentence


async def test_8_a_worker_is_alive_but_does_not_serve(world: World) -> None:
    await world.all_but()
    world.ready["w0"] = False
    (sentence,) = wrong(await world.examine())
    assert "the worker w0 at 127.0.0.1" in sentence and "runs but does not serve" in sentence


async def test_9_a_lane_is_unreachable(world: World) -> None:
    await world.all_but("w1")
    with refusing_address() as address:
        await world.worker("w1", bulk_address=address)
        (sentence,) = wrong(await world.examine())
    assert f"the bulk lane of the worker w1 cannot be reached at {address}" in sentence


def certificates(tmp_path: Path) -> Certified:
    made = Certified(tmp_path)
    made.issue("gateway")
    return made


async def checked(files: CertificateFiles) -> list[Finding]:
    config = {"tls_ca_file": files.ca, "tls_cert_file": files.cert, "tls_key_file": files.key}
    with refusing_address() as address:
        return await examine(DoctorTarget(services=ServiceConfig(etcd_url=address, **config)))


async def test_10_a_certificate_has_expired(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    made.issue("gateway", age_s=3 * DAY.total_seconds())
    (sentence,) = wrong(await checked(made.files("gateway")))
    assert "gateway.pem) expired 2.0 days ago; replace it" in sentence


async def test_11_the_key_is_of_another_certificate(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    made.issue("worker")
    files = CertificateFiles(
        "tls", made.ca_file, tmp_path / "gateway.pem", tmp_path / "worker-key.pem"
    )
    (sentence,) = wrong(await checked(files))
    assert "give a matching pair" in sentence


async def test_12_the_ca_differs(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    files = certificates(tmp_path / "ours").files("gateway")
    ca_file = certificates(tmp_path / "theirs").ca_file
    mixed = CertificateFiles("tls", ca_file, files.cert, files.key)
    (sentence,) = wrong(await checked(mixed))
    assert "does not match the certificate" in sentence and "use the CA that issued it" in sentence


async def test_13_services_use_tls_and_the_doctor_does_not(world: World, tmp_path: Path) -> None:
    made = certificates(tmp_path)
    server = Server(
        "127.0.0.1",
        0,
        ProcessServicer("gateway", list, lambda: True),
        health_names=[SERVICE["gateway"]],
        transport=made.transport("gateway"),
    )
    await server.start()
    world.stack.push_async_callback(server.stop, 0)
    await world.all_but("gateway")
    await world.service("gateway", address=f"127.0.0.1:{server.port}")
    (sentence,) = wrong(await world.examine())
    assert "the gateway cannot be reached" in sentence or "trust each other" in sentence


@asynccontextmanager
async def http_server(answer: Callable[[str], tuple[int, Any]]) -> AsyncIterator[str]:
    """Answers each path with a status and JSON."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        status, body = answer(head.split()[1])
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\nConnection: close"
        writer.write(f"{head}\r\n\r\n".encode())
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_14_the_gateway_is_not_ready() -> None:
    async with http_server(lambda _: (503, {"missing": ["1 of 2 workers have registered"]})) as url:
        (sentence,) = wrong(await examine(DoctorTarget(url=url)))
    assert "is not ready (1 of 2 workers have registered)" in sentence


async def test_15_the_key_is_wrong() -> None:
    def answer(path: str) -> tuple[int, Any]:
        return (200, {}) if path == "/ready" else (401, {"error": {"message": "no"}})

    async with http_server(answer) as url:
        (sentence,) = wrong(await examine(DoctorTarget(url=url, api_key="wrong")))
        assert "rejects this API key; set another with TIDESERVE_API_KEY" in sentence
        sentences = wrong(await examine(DoctorTarget(url=url, admin_url=url, admin_key="wrong")))
        assert "TIDESERVE_ADMIN_KEY" in sentences[1]


async def test_16_no_gateway_listens() -> None:
    with refusing_address() as address:
        (sentence,) = wrong(await examine(DoctorTarget(url=f"http://{address}")))
    assert f"no gateway answers at http://{address}" in sentence


async def test_a_real_completion_is_requested() -> None:
    with fake_openai() as server:
        server.pages |= {"/ready": {}, "/ready?model=fake": {}}
        server.pages["/v1/models"] = {"data": [{"id": "fake"}]}
        findings = await examine(DoctorTarget(url=server.url))
    assert [finding.level for finding in findings] == [Level.OK, Level.OK, Level.WARNING], findings
    assert "fake answered within" in findings[1].sentence
    (asked,) = server.received
    assert (asked["model"], asked["max_tokens"]) == ("fake", 4)


async def test_a_missing_worker_is_named(world: World) -> None:
    await world.all_but()
    state = {"pid": os.getpid(), "programs": ["worker-0", "worker-1"], "pids": {"worker-0": 1}}
    findings = await examine(DoctorTarget(ServiceConfig(etcd_url=world.url), state=state))
    waiting, dead = (finding.sentence for finding in findings if finding.check == "processes")
    assert waiting.startswith("worker-0 (process 1) runs but is not registered")
    assert dead.startswith("worker-1 is dead")
    assert wrong(findings) == [waiting, dead]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (ProcessLimits(1024, 65530, 2**30), "may open 1024 files"),
        (ProcessLimits(8192, 1000, 2**30), "set vm.max_map_count to 65530"),
        (ProcessLimits(8192, 65530, 2**20), "/dev/shm has 1 MiB free"),
    ],
)
def test_17_limits_are_too_low(limits: ProcessLimits, message: str) -> None:
    (finding,) = check_limits(limits)
    assert finding.level is Level.WARNING and message in finding.sentence


@pytest.mark.parametrize(
    ("version", "health", "size", "skew_s", "message"),
    [
        ("3.5.16", {"health": "false", "reason": "ALARM NOSPACE"}, 1.0, 0.5, "(ALARM NOSPACE)"),
        ("3.5.1", {"health": "true"}, 1.0, 0.5, "upgrade it to 3.5.3"),
        ("3.5.16", {"health": "true"}, 90.0, 0.5, "uses 90% of its quota"),
        ("3.5.16", {"health": "true"}, 1.0, -61.0, "differs from that of u by 61 s"),
    ],
)
def test_18_etcd_is_about_to_fail(
    version: str, health: dict[str, str], size: float, skew_s: float, message: str
) -> None:
    (finding,) = judge("u", version, health, {SIZE: size, QUOTA: 100.0}, skew_s)
    assert message in finding.sentence


@pytest.mark.parametrize(
    ("owners", "wants_admin", "level", "message"),
    [
        (["alice", "OPS"], True, Level.OK, "keys: 2, owners: 2, admin keys: 1"),
        (["alice"], False, Level.OK, "admin keys: 0"),
        (["alice"], True, Level.WARNING, "--owner NAME --admin"),
        ([], False, Level.FAILURE, "all requests are rejected"),
    ],
)
def test_a_key_file_that_admits_no_one(
    tmp_path: Path, owners: list[str], wants_admin: bool, level: Level, message: str
) -> None:
    path = tmp_path / "keys.jsonl"
    path.touch(0o600)
    for owner in owners:
        add_key(path, owner.lower(), owner.isupper(), None, QuotaLimits())
    (finding,) = check_keys(path, wants_admin)
    assert finding.level is level and message in finding.sentence


def test_a_key_file_that_a_gateway_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    for change, message in (
        (lambda: None, "create the file with `tideserve key new`"),
        (lambda: path.write_text('{"owner": "alice"}\n'), "line 1"),
        (lambda: path.chmod(0o620), "chmod 600"),
    ):
        change()
        (finding,) = check_keys(path, False)
        assert finding.level is Level.FAILURE and message in finding.sentence
        assert str(path) in finding.sentence and "no gateway can start" in finding.sentence


def test_a_key_file_that_others_could_replace(tmp_path: Path) -> None:
    add_key(tmp_path / "keys.jsonl", "alice", False, None, QuotaLimits())
    tmp_path.chmod(0o770)
    (finding,) = check_keys(tmp_path / "keys.jsonl", False)
    assert finding.level is Level.WARNING and f"chmod go-w {tmp_path}" in finding.sentence
    tmp_path.chmod(0o1777)
    (finding,) = check_keys(tmp_path / "keys.jsonl", False)
    assert finding.level is Level.OK


async def test_a_valid_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    (sentence,) = wrong(await examine(DoctorTarget(api_keys=path)))
    assert str(path) in sentence
    add_key(path, "alice", False, None, QuotaLimits())
    with fake_openai() as server:
        server.pages["/tideserve/v1/status"] = {}
        target = DoctorTarget(api_keys=path, admin_url=server.url)
        assert "no admin key" in wrong(await examine(target), Level.WARNING)[0]
        assert wrong(await examine(replace(target, admin_key="k")), Level.WARNING) == []


def test_19_no_cluster_runs_and_the_port_is_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(CommandError, match="1 check failed") as error,
    ):
        run_doctor(None, tmp_path, taken.getsockname()[1], True)
    assert error.value.exit_code == 1
    by_check = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert "Address already in use" in by_check["ports"]["sentence"]
    assert "start a cluster with `tideserve up`" in by_check["cluster"]["sentence"]


def test_a_local_cluster_is_found_by_its_folder(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path)
    assert target_of_folder(folder) is None
    folder.claim()
    folder.write_state({"url": "http://u", "admin_url": "http://a"})
    config = {"etcd_url": "http://e:1", "model_name": "m", "model_dir": "d", "api_key": "secret"}
    folder.write_config("gateway", config)
    target = target_of_folder(folder)
    assert target is not None and target.services is not None
    assert (target.url, target.admin_url, target.api_key) == ("http://u", "http://a", "secret")
    assert (target.services.etcd_url, target.here) == ("http://e:1", True)
    key = tmp_path / "admin.key"
    key.write_text("k" * 32 + "\n")
    folder.write_config("gateway", config | {"admin_key_file": str(key)})
    target = target_of_folder(folder)
    assert target is not None and target.admin_key == "k" * 32
    folder.write_config("gateway", config | {"api_keys_file": str(tmp_path / "keys.jsonl")})
    target = target_of_folder(folder, "given", "given too")
    assert target is not None and target.api_keys == tmp_path / "keys.jsonl"
    assert (target.api_key, target.admin_key) == ("given", "given too")
    folder.write_config("gateway", config | {"tls_ca_file": "a"})
    with pytest.raises(CommandError, match="tls"):
        target_of_folder(folder)
    folder.release()


def test_options_of_a_cluster_anywhere() -> None:
    target = target_of_options({"etcd_url": "e:1", "etcd_user": None}, {"url": "u"})
    assert target.services == ServiceConfig(etcd_url="e:1") and target.url == "u"
    assert target_of_options({"etcd_url": None}, {"url": "u"}).services is None
    with pytest.raises(CommandError, match="etcd_url"):
        target_of_options({"etcd_user": "me"}, {})
