"""A full gateway: responses to new clients, and limits per address."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import grpc.aio
import httpx

from services.common.etcd import Store
from tests.support.fake_cluster import fake_cluster
from tests.support.gateway import TIMEOUT_S, endless
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.http2 import DATA, PREFACE, SETTINGS, frame, whole_call
from tests.support.waiting import eventually
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

OPEN_FILES = 200
"""Descriptors that leave 100 connections for clients, 50 per address."""
STREAMS = 99
NEW = 12
WATCH = "/grpc.health.v1.Health/Watch"


async def asked(gateway: GatewayProcess, address: str, path: str) -> int | str:
    """The status of a request on a new connection, or the name of an error."""
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(base_url=gateway.url, transport=transport) as client:
        try:
            return (await client.get(path, timeout=TIMEOUT_S)).status_code
        except httpx.TransportError as error:
            return type(error).__name__


async def test_simultaneous_new_requests_are_refused_with_a_response(
    store: Store, tmp_path: Path
) -> None:
    async with (
        fake_cluster(store, endless, 1) as cluster,
        gateway_process(cluster, tmp_path, open_files=OPEN_FILES) as gateway,
        AsyncExitStack() as stack,
    ):
        (worker,) = cluster.workers
        worker.pause_at = 2
        begun = 0

        async def stream(address: str) -> None:
            nonlocal begun
            transport = httpx.AsyncHTTPTransport(local_address=address)
            client = httpx.AsyncClient(base_url=gateway.url, transport=transport)
            await stack.enter_async_context(client)
            body = {"model": "m", "prompt": "hi", "max_tokens": 4, "stream": True}
            streaming = client.stream("POST", "/v1/completions", json=body, timeout=TIMEOUT_S)
            response = await stack.enter_async_context(streaming)
            assert response.status_code == 200
            begun += 1

        for first in range(0, STREAMS, 11):
            numbers = range(first, min(STREAMS, first + 11))
            await asyncio.gather(*(stream(f"127.0.0.{3 + number % 4}") for number in numbers))
        assert begun == STREAMS
        for paths in (["/v1/models"] * NEW, ["/live", "/v1/models"] * NEW):
            answers = await asyncio.gather(*(asked(gateway, "127.0.0.9", path) for path in paths))
            statuses = Counter(zip(paths, answers, strict=True))
            assert {status for (path, status) in statuses if path == "/live"} <= {200}
            assert {status for (path, status) in statuses if path != "/live"} <= {200, 503}
        worker.go.set()


async def test_calls_without_a_key_do_not_occupy_the_connections(
    store: Store, tmp_path: Path
) -> None:
    async with (
        fake_cluster(store, endless, 1) as cluster,
        gateway_process(cluster, tmp_path, open_files=OPEN_FILES) as gateway,
        AsyncExitStack() as stack,
    ):

        async def called(address: str) -> None:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", gateway.grpc_port, local_addr=(address, 0)
            )
            stack.callback(writer.close)
            writer.write(PREFACE + frame(SETTINGS, 0, 0) + whole_call(1, WATCH, b""))
            kind = SETTINGS
            while kind != DATA:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3]))
                kind = head[3]

        # Three descriptors each.
        for address, count in (("127.0.0.3", 16), ("127.0.0.4", 16), ("127.0.0.5", 1)):
            for _ in range(count):
                await called(address)

        async def served() -> bool:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                try:
                    await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
                except grpc.aio.AioRpcError:
                    return False
                return True

        await eventually(served)
