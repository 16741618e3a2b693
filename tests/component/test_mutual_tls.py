"""Gateway, scheduler and memory manager over mutual TLS, with a fake worker, under load.

tests/robustness/test_mutual_tls.py does the same for a whole cluster.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest

from services.common.etcd import Store
from services.common.grpc_client import open_channel
from services.common.role import SERVICE_ROLES
from services.gateway import app as gateway_app
from services.gateway.config import GatewayConfig
from services.memmgr import app as memmgr_app
from services.memmgr.config import MemmgrConfig
from services.scheduler import app as scheduler_app
from services.scheduler.config import SchedulerConfig
from tests.support.byte_tokenizer import write_model_folder
from tests.support.certified import Certified
from tests.support.control_plane import (
    LEASE_TTL_S,
    read_group,
    service_address,
    serving,
    worker_record,
)
from tests.support.control_plane import (
    FakeWorker as Reports,
)
from tests.support.fake_cluster import FakeWorker, running_worker
from tests.support.gateway import endless
from tests.support.ports import free_port
from tests.support.waiting import DEADLINE_S, eventually
from tideserve.cli.certificates import Authority
from tideserve.common.v1 import process_pb2, process_pb2_grpc

STREAMS = 4
TOKENS = 40


@pytest.fixture
def certified(tmp_path: Path) -> Certified:
    certified = Certified(tmp_path)
    for role in SERVICE_ROLES:
        certified.issue(role)
    return certified


@asynccontextmanager
async def gateway(
    store: Store, certified: Certified, model_dir: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """A gateway's clients of its public and admin ports, once both listen."""
    write_model_folder(model_dir)
    port, admin_port = free_port(), free_port()
    config = GatewayConfig(
        etcd_url=store.url,
        lease_ttl_s=LEASE_TTL_S,
        model_name="m",
        model_dir=model_dir,
        port=port,
        admin_port=admin_port,
        # Requests wait for as long as a scheduler takes to restart.
        admit_timeout_s=DEADLINE_S,
        **certified.config("gateway"),
    )
    async with (
        serving(gateway_app.serve, config),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S) as http,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}", timeout=DEADLINE_S) as admin,
    ):
        for client in (http, admin):
            await eventually(partial(listens, client))
        yield http, admin


async def listens(client: httpx.AsyncClient) -> bool:
    """Whether the client's port accepts connections."""
    try:
        await client.get("/")
    except httpx.ConnectError:
        return False
    return True


@asynccontextmanager
async def scheduler(store: Store, certified: Certified, reports: Reports) -> AsyncIterator[None]:
    """A scheduler to which the worker reports."""
    config = SchedulerConfig(
        etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, **certified.config("scheduler")
    )
    async with serving(scheduler_app.serve, config):
        address = await service_address(store, "scheduler")
        async with reports.reporting(address, certified.transport("worker")):
            yield


@dataclass
class Load:
    """Concurrent loops of requests to a worker in a group of the memory manager."""

    store: Store
    http: httpx.AsyncClient
    worker: FakeWorker
    reports: Reports
    answers: list[tuple[int, int]] = field(default_factory=list)
    ending: bool = False

    async def ask_again_and_again(self) -> None:
        body = {"model": "m", "prompt": "hi", "max_tokens": TOKENS}
        while not self.ending:
            answer = await self.http.post("/v1/completions", json=body)
            usage = answer.json().get("usage", {})
            self.answers.append((answer.status_code, usage.get("completion_tokens")))

    async def some_more(self) -> None:
        wanted = len(self.answers) + 2 * STREAMS

        async def there() -> bool:
            # The memory manager adopts the group under a new epoch.
            group = await read_group(self.store, "w0")
            assert group is not None
            self.worker.epoch = self.reports.load.epoch = group.epoch
            return len(self.answers) >= wanted

        await eventually(there)


async def all_ready(admin: httpx.AsyncClient) -> bool:
    """Whether all services report to the gateway that they are ready."""
    status = (await admin.get("/tideserve/v1/status")).json()
    ready = {row["name"] for row in status["services"] if row["ready"]}
    return ready >= {"gateway", "scheduler", "memmgr", "w0"} and "errors" not in status


async def refused(channel: grpc.aio.Channel) -> bool:
    """Whether a connection is refused; closes the channel."""
    async with channel:
        stub = process_pb2_grpc.ProcessServiceStub(channel)
        try:
            await stub.GetProcess(process_pb2.GetProcessRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


async def test_certificates_and_the_ca_change_without_a_failed_request(
    store: Store, certified: Certified, tmp_path: Path
) -> None:
    first, second = certified.authority, Authority.create("second")
    memmgr = MemmgrConfig(etcd_url=store.url, lease_ttl_s=LEASE_TTL_S, **certified.config("memmgr"))
    worker, reports = FakeWorker("w0", endless), Reports(worker_record())
    async with (
        running_worker(store, worker, certified.transport("worker")),
        serving(memmgr_app.serve, memmgr),
        gateway(store, certified, tmp_path / "model") as (http, admin),
        asyncio.TaskGroup() as tasks,
    ):
        load = Load(store, http, worker, reports)
        asking = [tasks.create_task(load.ask_again_and_again()) for _ in range(STREAMS)]
        for trusted, issuer in (((first,), first), ((first, second), second), ((second,), second)):
            certified.trust(*trusted)
            for role in SERVICE_ROLES:
                certified.issue(role, issuer)
            # The former scheduler has stopped meanwhile: all connect to its successor.
            async with scheduler(store, certified, reports):
                await load.some_more()
                await eventually(lambda: all_ready(admin))
                if trusted == (second,):
                    load.ending = True
                    await asyncio.wait(asking)
        certified.issue("gateway", first, name="former")
        assert await refused(certified.transport("former").dial(worker.address, "worker"))
        assert await refused(open_channel(worker.address))
    assert set(load.answers) == {(200, TOKENS)}
