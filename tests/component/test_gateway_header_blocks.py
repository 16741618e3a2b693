"""Endless header blocks at the gRPC port: memory is bounded, and other clients are served."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from services.common.etcd import Store
from tests.support.fake_cluster import fake_cluster
from tests.support.gateway import endless
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.http2 import (
    CONTINUATION,
    DATA,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    block_of,
    frame,
    literal,
    whole_call,
)
from tests.support.waiting import eventually

ATTACKERS, HONEST = 300, 64
ROUNDS = 3
GROWTH_MAX_BYTES = 64 * 2**20
SENT_MAX_BYTES = 2**29
"""Bytes that attackers would send to an unprotected gateway."""
LEFT_MAX_BYTES = 32 * 2**20
OTHER = "127.0.0.2"
LIST = "/tideserve.gateway.v1.GatewayService/ListModels"
ENDLESS = 16 * frame(CONTINUATION, 0, 1, literal("a" * 20, "b" * 8000))


class Attack:
    """Clients at 127.0.0.1 that repeatedly begin calls with endless headers."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sent_bytes = 0
        self.closed = 0

    async def run(self) -> None:
        """Attack with all clients."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(ATTACKERS):
                tasks.create_task(self._client())

    @property
    def over(self) -> bool:
        """Whether the gateway closed enough connections, or read too many bytes."""
        return self.closed >= ROUNDS * ATTACKERS or self.sent_bytes > SENT_MAX_BYTES

    async def _client(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                begun = frame(HEADERS, 0, 1, block_of(LIST))
                writer.write(PREFACE + frame(SETTINGS, 0, 0) + begun)
                while not reader.at_eof():
                    writer.write(ENDLESS)
                    self.sent_bytes += len(ENDLESS)
                    await writer.drain()
            except ConnectionError:
                pass
            finally:
                writer.close()
            self.closed += 1
            await asyncio.sleep(0.5)


@asynccontextmanager
async def called(port: int, address: str) -> AsyncIterator[bool]:
    """Whether a call on a new connection from `address` succeeds; keeps it open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    try:
        writer.write(PREFACE + frame(SETTINGS, 0, 0) + whole_call(1, LIST, b""))
        kind = SETTINGS
        while kind not in (DATA, RST_STREAM):
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3]))
            kind = head[3]
        yield kind == DATA
    finally:
        writer.close()


async def served(gateway: GatewayProcess) -> None:
    """Check that probes and calls of other addresses, and of the attackers' address, are served."""
    transport = httpx.AsyncHTTPTransport(local_address=OTHER)
    async with httpx.AsyncClient(base_url=gateway.url, transport=transport) as client:
        for path in ("/live", "/ready"):
            assert (await client.get(path, timeout=30)).status_code == 200
    async with AsyncExitStack() as stack:
        addresses = [OTHER, *["127.0.0.1"] * HONEST]
        calls = [stack.enter_async_context(called(gateway.grpc_port, name)) for name in addresses]
        assert all(await asyncio.gather(*calls))


async def test_endless_header_blocks_are_bounded_and_others_are_served(
    store: Store, tmp_path: Path
) -> None:
    async with (
        fake_cluster(store, endless, 1) as cluster,
        gateway_process(cluster, tmp_path) as gateway,
    ):
        await served(gateway)
        before, most = gateway.rss, 0
        attack = Attack(gateway.grpc_port)
        attacking = asyncio.create_task(attack.run())
        serving = asyncio.create_task(served(gateway))

        async def over() -> bool:
            nonlocal most
            most = max(most, gateway.rss)
            return attack.over and serving.done()

        await eventually(over)
        attacking.cancel()
        print(f"{(most - before) >> 20} MiB more for {attack.sent_bytes >> 20} MiB of headers")
        assert most - before <= GROWTH_MAX_BYTES
        await serving
        await eventually(lambda: gateway.rss - before <= LEFT_MAX_BYTES)
        closed = 'connections_closed_total{port="grpc",reason="headers"}'
        async with httpx.AsyncClient(base_url=gateway.url) as client:
            assert closed in (await client.get("/metrics")).text
