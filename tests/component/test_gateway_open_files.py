"""Idle connections beyond the limit of open files: the gateway still serves and dials."""

import asyncio
import contextlib
from pathlib import Path

import httpx

from services.common.etcd import Store
from tests.support.fake_cluster import FakeWorker, fake_cluster, running_worker
from tests.support.gateway import TEXT, TIMEOUT_S, endless, text_ids
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.http2 import PREFACE, SETTINGS, frame
from tests.support.waiting import eventually

OPEN_FILES = 256
SPARE = 16
"""Descriptors that stay free."""
IDLE_HTTP, IDLE_GRPC = 400, 100
PAUSE_S = 5.0
OTHER = "127.0.0.2"
LIVE = b"GET /live HTTP/1.1\r\nhost: gateway\r\n\r\n"
OPENING = PREFACE + frame(SETTINGS, 0, 0)
TOKENS = 40


class IdleClients:
    """Clients that connect, send some bytes and idle; they reconnect when closed."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._http_port = int(gateway.url.rpartition(":")[2])
        self._grpc_port = gateway.grpc_port
        self.connected = 0

    async def run(self) -> None:
        """Keep connections open."""
        async with asyncio.TaskGroup() as tasks:
            for sent in (LIVE, b""):
                for _ in range(IDLE_HTTP // 2):
                    tasks.create_task(self._client(self._http_port, sent))
            for _ in range(IDLE_GRPC):
                tasks.create_task(self._client(self._grpc_port, OPENING))

    async def _client(self, port: int, sent: bytes) -> None:
        while True:
            with contextlib.suppress(OSError):
                await self._connect(port, sent)
            await asyncio.sleep(PAUSE_S)

    async def _connect(self, port: int, sent: bytes) -> None:
        """Connect, and wait until the gateway closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self.connected += 1
        try:
            writer.write(sent)
            while await reader.read(2**16):
                pass
        finally:
            writer.close()


async def asked(gateway: GatewayProcess, address: str, method: str, path: str) -> int:
    """The status of a request on a new connection from an address; 0: the connection closed."""
    transport = httpx.AsyncHTTPTransport(local_address=address)
    async with httpx.AsyncClient(base_url=gateway.url, transport=transport) as client:
        body = {"model": "m", "prompt": "hi", "max_tokens": 3}
        try:
            response = await client.request(method, path, json=body, timeout=TIMEOUT_S)
        except httpx.TransportError:
            return 0
        return response.status_code


async def completed(gateway: GatewayProcess, address: str) -> int:
    """The status of a completion."""
    return await asked(gateway, address, "POST", "/v1/completions")


async def streamed(gateway: GatewayProcess) -> str:
    """The events of a stream that lasts as long as the worker pauses."""
    async with httpx.AsyncClient(base_url=gateway.url, timeout=TIMEOUT_S) as client:
        body = {"model": "m", "prompt": "hi", "max_tokens": TOKENS, "stream": True}
        return (await client.post("/v1/completions", json=body)).text


async def test_idle_connections_beyond_the_limit_of_open_files(
    store: Store, tmp_path: Path
) -> None:
    async with (
        fake_cluster(store, endless, 1) as cluster,
        gateway_process(cluster, tmp_path, open_files=OPEN_FILES) as gateway,
    ):
        (first,) = cluster.workers
        first.pause_at = TOKENS // 2
        streams = [asyncio.create_task(streamed(gateway)) for _ in range(4)]
        await eventually(lambda: len(first.active) == len(streams))
        idle = IdleClients(gateway)
        idling = asyncio.create_task(idle.run())
        await eventually(lambda: idle.connected >= IDLE_HTTP + IDLE_GRPC + OPEN_FILES)
        for path in ("/live", "/ready"):
            assert await asked(gateway, OTHER, "GET", path) == 200
        # The gateway opens a channel to a new worker reported by etcd's watch.
        second = FakeWorker("later", lambda _: text_ids(TEXT))
        async with running_worker(store, second):
            cluster.scheduler.workers = [second]
            assert await completed(gateway, OTHER) == 200
            assert second.starts
            # The channel breaks and is reopened.
            second.hang_up()
            assert await eventually(lambda: completed(gateway, OTHER)) == 200

            async def same_address_served() -> bool:
                return await completed(gateway, "127.0.0.1") == 200

            await eventually(same_address_served)
        cluster.scheduler.workers = [first]
        assert gateway.process.num_fds() <= OPEN_FILES - SPARE
        first.go.set()
        for text in await asyncio.gather(*streams):
            assert text.endswith("data: [DONE]\n\n") and "error" not in text
        idling.cancel()
        await asyncio.gather(idling, return_exceptions=True)
        assert await completed(gateway, "127.0.0.1") == 200
        assert len(gateway.log.read_text().splitlines()) < 10
