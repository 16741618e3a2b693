"""Endless small frames at the gRPC port: the gateway still serves other clients."""

import asyncio
import select
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
import httpx
import pytest

from services.common.etcd import Store
from tests.support.fake_cluster import fake_cluster
from tests.support.gateway import endless
from tests.support.gateway_process import GatewayProcess, gateway_process
from tests.support.http2 import PREFACE, SETTINGS, frame
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

ATTACKERS = 64
PRIORITY, UNKNOWN = 2, 32
LIVE_MAX_S = 1.0
CALL_MAX_S = 30.0
OTHER = "127.0.0.2"


class Attack(threading.Thread):
    """Clients at 127.0.0.1 that send a frame endlessly."""

    def __init__(self, port: int, sent: bytes) -> None:
        super().__init__()
        self._port = port
        self._sent = sent * (2**18 // len(sent))
        self._over = threading.Event()
        self.begun = threading.Event()

    def run(self) -> None:
        clients = {self._connect() for _ in range(ATTACKERS)}
        self.begun.set()
        while not self._over.is_set():
            readable, writable, _ = select.select(clients, clients, [], 0.1)
            for client in {*readable, *writable}:
                try:
                    if client in readable and not client.recv(2**16):
                        raise ConnectionError
                    if client in writable:
                        client.send(self._sent)
                except BlockingIOError:
                    continue
                except OSError:
                    client.close()
                    clients.remove(client)
                    clients.add(self._connect())
        for client in clients:
            client.close()

    def end(self) -> None:
        """Close the connections."""
        self._over.set()
        self.join()

    def _connect(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self._port))
        client.sendall(PREFACE + frame(SETTINGS, 0, 0))
        client.setblocking(False)
        return client


@contextmanager
def attacked(gateway: GatewayProcess, sent: bytes) -> Iterator[None]:
    """Attack with a frame."""
    attack = Attack(gateway.grpc_port, sent)
    attack.start()
    try:
        assert attack.begun.wait(30)
        yield
    finally:
        attack.end()


async def live_s(gateway: GatewayProcess) -> float:
    """Duration of a probe from another address."""
    transport = httpx.AsyncHTTPTransport(local_address=OTHER)
    async with httpx.AsyncClient(base_url=gateway.url, transport=transport) as client:
        began_s = time.perf_counter()
        assert (await client.get("/live", timeout=60)).status_code == 200
        return time.perf_counter() - began_s


@pytest.mark.parametrize(
    "sent",
    [frame(UNKNOWN, 0, 0), frame(PRIORITY, 0, 3, bytes([0, 0, 0, 0, 1]))],
    ids=["unknown", "priority"],
)
async def test_endless_small_frames_do_not_block_the_loop(
    store: Store, tmp_path: Path, sent: bytes
) -> None:
    async with (
        fake_cluster(store, endless, 1) as cluster,
        gateway_process(cluster, tmp_path) as gateway,
    ):
        with attacked(gateway, sent):
            probes_s = [await live_s(gateway) for _ in range(7)]
            print("seconds of /live:", *(f"{probe_s:.3f}" for probe_s in probes_s))
            # The attackers' address is served as well.
            async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                assert await stub.ListModels(pb.ListModelsRequest(), timeout=CALL_MAX_S)
        assert statistics.median(probes_s) < LIVE_MAX_S
        await asyncio.gather(*(live_s(gateway) for _ in range(3)))
