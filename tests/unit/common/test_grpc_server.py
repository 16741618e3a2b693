"""A server that listens before it serves, its health service, and the probe of containers."""

import asyncio
import http.server
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common import probe
from services.common.grpc_client import open_channel
from services.common.grpc_server import ProcessServicer, Server
from tests.support.waiting import DEADLINE_S
from tideserve.memmgr.v1 import memmgr_pb2, memmgr_pb2_grpc

NAME = "tideserve.memmgr.v1.MemmgrService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Bench:
    def __init__(self) -> None:
        self.ready = False
        process = ProcessServicer("memmgr", list, lambda: self.ready)
        self.server = Server("127.0.0.1", 0, process, [NAME], ["another.Name"])

    @asynccontextmanager
    async def started(self) -> AsyncIterator[health_pb2_grpc.HealthStub]:
        await self.server.start()
        try:
            async with open_channel(self.server.address) as channel:
                yield health_pb2_grpc.HealthStub(channel)
        finally:
            await self.server.stop(1.0)


async def status(stub: health_pb2_grpc.HealthStub, name: str) -> int:
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_S)
    return int(answer.status)


async def test_process_health_is_immediate_and_service_health_follows_readiness() -> None:
    bench = Bench()
    async with bench.started() as stub:
        for name in (NAME, "another.Name"):
            assert await status(stub, name) == NOT_SERVING
        assert await status(stub, "") == SERVING
        bench.ready = True
        assert await status(stub, NAME) == SERVING
        # A service may cease to be ready by the passing of time alone.
        bench.ready = False
        assert await status(stub, NAME) == NOT_SERVING
        bench.ready = True
        bench.server.drain()
        assert await status(stub, NAME) == NOT_SERVING
        assert await status(stub, "") == SERVING


async def test_an_unknown_service_name_is_not_found() -> None:
    bench = Bench()
    async with bench.started() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(stub, "a.B")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=DEADLINE_S)
        assert {name: status.status for name, status in listed.statuses.items()} == {
            "": SERVING,
            NAME: NOT_SERVING,
            "another.Name": NOT_SERVING,
        }


async def test_a_watch_streams_changes_and_ends_with_the_server() -> None:
    bench = Bench()
    async with bench.started() as stub, asyncio.TaskGroup() as tasks:
        call = stub.Watch(health_pb2.HealthCheckRequest(service=NAME), timeout=DEADLINE_S)
        assert (await call.read()).status == NOT_SERVING
        bench.ready = True
        assert (await call.read()).status == SERVING
        stopping = tasks.create_task(bench.server.stop(DEADLINE_S))
        assert (await call.read()).status == NOT_SERVING
        assert await call.read() is grpc.aio.EOF
        await stopping


async def test_calls_are_refused_until_the_service_is_added() -> None:
    class Servicer(memmgr_pb2_grpc.MemmgrServiceServicer):
        async def GetCluster(self, request, context):  # type: ignore[no-untyped-def]
            return memmgr_pb2.GetClusterResponse()

    bench = Bench()
    async with bench.started(), open_channel(bench.server.address) as channel:
        stub = memmgr_pb2_grpc.MemmgrServiceStub(channel)
        request = memmgr_pb2.GetClusterRequest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetCluster(request, timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "starting" in (caught.value.details() or "")
        memmgr_pb2_grpc.add_MemmgrServiceServicer_to_server(Servicer(), bench.server.services)
        assert await stub.GetCluster(request, timeout=DEADLINE_S) == memmgr_pb2.GetClusterResponse()
        unknown = channel.unary_unary(f"/{NAME}/NoSuchMethod")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unknown(b"", timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_probe_asks_as_health_checks_do() -> None:
    bench = Bench()
    async with bench.started():
        url = f"grpc://{bench.server.address}/"

        async def ask(name: str) -> int:
            return await asyncio.to_thread(probe.main, [url + name, "--timeout", "20"])

        assert await ask("") == 0
        assert await ask(NAME) == 1
        bench.ready = True
        assert await ask(NAME) == 0
        assert await ask("a.B") == 1
    assert await asyncio.to_thread(probe.main, [url]) == 1


@contextmanager
def answering(code: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code if self.path == "/ready?a=1" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/ready?a=1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(("code", "result"), [(200, 0), (204, 0), (404, 1), (503, 1)])
def test_the_probe_over_http(code: int, result: int) -> None:
    with answering(code) as url:
        assert probe.main([url]) == result
    assert probe.main([url]) == 1


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://a/", "grpc://"])
def test_invalid_addresses_are_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert probe.main([url]) == 1
    assert "is not a URL" in capsys.readouterr().err


def test_the_probe_program_imports_little() -> None:
    """A health check starts it every few seconds; over HTTP it needs no gRPC."""
    with answering(200) as url:
        code = (
            "import sys; from services.common import probe;"
            f"assert probe.main([{url!r}]) == 0;"
            "heavy = {'grpc', 'google.protobuf', 'yaml', 'asyncio'} & set(sys.modules);"
            "assert not heavy, heavy"
        )
        done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
        assert done.returncode == 0
        command = [sys.executable, "-m", "services.common.probe", url]
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
