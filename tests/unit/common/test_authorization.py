"""Every method with every role and without a certificate, over real connections."""

import importlib
import pkgutil
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import tideserve
from services.common.authorization import METHODS
from services.common.grpc_client import open_channel
from services.common.grpc_server import ProcessServicer, Server
from services.common.role import ROLES
from services.common.transport import Transport
from tests.support.certified import DAY, Certified
from tideserve.cli.certificates import Authority, write_pair

TIMEOUT_S = 20.0
STRANGER = "stranger"
# For clients, which have keys instead of certificates, at a port of its own.
PUBLIC = "tideserve.gateway.v1.GatewayService"
OFFERED_BY_EVERY_SERVER = ("tideserve.common.v1.ProcessService", "grpc.")

# The methods that each role may call. The code lists the roles of each method.
HEALTH = {"Health.Check", "Health.List", "Health.Watch"}
GROUPS = {
    f"MemmgrService.{m}"
    for m in ("ListGroups", "GetCluster", "MergeGroups", "SplitGroup", "MoveRequests")
}
ALLOWED = {
    "gateway": HEALTH
    | GROUPS
    | {"WorkerService.Generate", "SchedulerService.Admit", "ProcessService.GetProcess"}
    | {"SchedulerService.ListRefusals", "GatewayPeerService.EndRequest"},
    "scheduler": HEALTH | {"MemmgrService.ReportDemand", "MemmgrService.WatchShortfalls"},
    "memmgr": HEALTH
    | {f"MemberService.{m}" for m in ("Prepare", "Abort", "Introduce", "ShipRequests")},
    "worker": HEALTH
    | {"SchedulerService.ReportLoad", "SchedulerService.FindRoom", "MemmgrService.ReportMemory"},
    "admin": HEALTH
    | GROUPS
    | {"SchedulerService.ListRefusals", "ProcessService.GetProcess"}
    | {"ServerReflection.ServerReflectionInfo"},
    STRANGER: HEALTH,
}


def all_methods() -> dict[str, MethodDescriptor]:
    """Every method of every contract that a server offers, by its full name."""
    files = [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    for module in pkgutil.walk_packages(tideserve.__path__, "tideserve."):
        if module.name.endswith("_pb2") and ".v1." in module.name:
            files.append(importlib.import_module(module.name).DESCRIPTOR)
    return {
        f"/{service.full_name}/{method.name}": method
        for file in files
        for service in file.services_by_name.values()
        if service.full_name != PUBLIC
        for method in service.methods
    }


ALL = all_methods()


def short(method: str) -> str:
    """Service.Method without the package."""
    service, _, name = method[1:].partition("/")
    return f"{service.rpartition('.')[2]}.{name}"


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Certified:
    certified = Certified(tmp_path_factory.mktemp("certificates"))
    for role in (*ROLES, STRANGER):
        certified.issue(role)
    return certified


@asynccontextmanager
async def serving(transport: Transport) -> AsyncIterator[str]:
    """A worker's server that implements every call of every contract; returns its address."""
    ours = [name for name in ALL if not name[1:].startswith(OFFERED_BY_EVERY_SERVER)]
    services = sorted({name[1:].partition("/")[0] for name in ours})
    process = ProcessServicer("worker", list, lambda: True)
    server = Server("127.0.0.1", 0, process, services, transport=transport)
    for service in services:
        server.services.add_registered_method_handlers(
            service,
            {
                name.rpartition("/")[2]: answering(ALL[name])
                for name in ours
                if name.startswith(f"/{service}/")
            },
        )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop(0)


@asynccontextmanager
async def dialled(
    certified: Certified, caller: str, server: str = "worker", wanted: str = "worker"
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel of `caller` to `server`, which it takes for a `wanted`."""
    async with (
        serving(certified.transport(server)) as address,
        certified.transport(caller).dial(address, wanted) as channel,
    ):
        yield channel


def answering(method: MethodDescriptor) -> grpc.RpcMethodHandler:
    """A handler of the method's kind that answers with an empty message."""

    async def one(_request: Any, _context: Any) -> bytes:
        return b""

    async def several(_request: Any, _context: Any) -> AsyncIterator[bytes]:
        yield b""

    makers = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = makers[method.client_streaming, method.server_streaming]
    return make(several if method.server_streaming else one)


async def answer_of(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """OK if a message came. The client library reports INTERNAL if a refusal crosses a message that
    it still sends; a second call returns the status of the server.
    """
    for _ in range(10):
        code = await answer_once(channel, method)
        if code is not grpc.StatusCode.INTERNAL:
            break
    return code


async def answer_once(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    """The status of a single call."""
    call = channel.stream_stream(method)(iter([b""]), timeout=TIMEOUT_S)
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    code = grpc.StatusCode.OK if message is not grpc.aio.EOF else await call.code()
    call.cancel()
    return code


def test_every_method_has_a_row() -> None:
    assert METHODS.keys() == ALL.keys()
    assert {short(name) for name in ALL} == set().union(*ALLOWED.values())
    assert set(ALLOWED) == {*ROLES, STRANGER}


@pytest.mark.parametrize("role", ALLOWED)
async def test_a_role_may_call_only_the_methods_of_its_row(certified: Certified, role: str) -> None:
    async with dialled(certified, role) as channel:
        answers = {short(name): await answer_of(channel, name) for name in ALL}
    expected = {
        name: grpc.StatusCode.OK if name in ALLOWED[role] else grpc.StatusCode.PERMISSION_DENIED
        for name in answers
    }
    assert answers == expected


async def test_a_method_without_a_row_is_refused_to_all(
    certified: Certified, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = "/tideserve.worker.v1.WorkerService/Generate"
    monkeypatch.delitem(METHODS, method)
    async with serving(certified.transport("worker")) as address:
        for role in ROLES:
            async with certified.transport(role).dial(address, "worker") as channel:
                assert await answer_of(channel, method) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_refusal_names_the_role_that_may_call(certified: Certified) -> None:
    async with dialled(certified, "scheduler") as channel:
        call = channel.unary_unary("/tideserve.worker.v1.MemberService/Abort")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"", timeout=TIMEOUT_S)
    assert (
        "requires the role memmgr, but the caller's certificate has scheduler"
        in raised.value.details()
    )


@pytest.fixture
def refused_certificates(certified: Certified) -> None:
    """Certificate pairs of an expired gateway, and of a gateway of another CA."""
    certified.issue("gateway", age_s=2 * DAY.total_seconds(), name="expired")
    certified.issue("gateway", Authority.create("test"), name="foreign")


@pytest.mark.parametrize("name", ["expired", "foreign"])
@pytest.mark.usefixtures("refused_certificates")
async def test_an_expired_or_foreign_certificate_is_refused_on_both_ends(
    certified: Certified, name: str
) -> None:
    health = "/grpc.health.v1.Health/Check"
    async with dialled(certified, name) as channel:
        assert await answer_of(channel, health) is grpc.StatusCode.UNAVAILABLE
    async with dialled(certified, "worker", name, "gateway") as channel:
        assert await answer_of(channel, health) is grpc.StatusCode.UNAVAILABLE


async def test_calls_without_a_certificate_are_refused(certified: Certified) -> None:
    health = "/grpc.health.v1.Health/Check"
    trusting = grpc.ssl_channel_credentials(certified.ca_file.read_bytes())
    named = (("grpc.ssl_target_name_override", "worker.tideserve.internal"),)
    async with serving(certified.transport("worker")) as address:
        async with grpc.aio.secure_channel(address, trusting, options=named) as channel:
            assert await answer_of(channel, health) is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address) as channel:
            assert await answer_of(channel, health) is grpc.StatusCode.UNAVAILABLE


async def test_a_server_of_another_role_is_not_called(certified: Certified) -> None:
    """At any address: etcd could name a wrong one."""
    async with dialled(certified, "gateway", "worker", "memmgr") as channel:
        code = await answer_of(channel, "/grpc.health.v1.Health/Check")
    assert code is grpc.StatusCode.UNAVAILABLE


async def test_a_host_name_equal_to_a_role_grants_nothing(certified: Certified) -> None:
    issued = certified.authority.issue("gateway", ("gateway", "gateway.default.svc"), DAY)
    write_pair(certified.folder, "host", issued)
    async with dialled(certified, "host") as channel:
        code = await answer_of(channel, "/tideserve.worker.v1.WorkerService/Generate")
    assert code is grpc.StatusCode.PERMISSION_DENIED


def test_the_page_on_security_has_the_same_table() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `([\w.]+/\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert {f"/{method}": frozenset(roles.split(", ")) for method, roles in rows} == METHODS
