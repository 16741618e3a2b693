"""A real gateway in this process, in front of a fake cluster."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI

from services.common.etcd import Store
from services.gateway.app import serve
from services.gateway.config import GatewayConfig
from tests.support.byte_tokenizer import CHAT_TEMPLATE, EOS_ID, byte_tokenizer, write_model_folder
from tests.support.client import open_client
from tests.support.control_plane import LEASE_TTL_S, serving
from tests.support.fake_cluster import FakeCluster, FakeWorker, fake_cluster
from tests.support.ports import free_port
from tests.support.waiting import eventually
from tideserve.client import AsyncClient
from tideserve.common.v1 import adapter_pb2
from tideserve.scheduler.v1 import scheduler_pb2

TIMEOUT_S = 60.0
TOKENIZER = byte_tokenizer()
TEXT = "The tide comes in, and the tide goes out. Ça va — 日本語! "


def text_ids(text: str) -> list[int]:
    """Token ids of a text."""
    return list(TOKENIZER.encode(text).ids)


def endless(prompt_ids: Sequence[int]) -> list[int]:
    """Endless output tokens: a repeated text."""
    return text_ids(TEXT) * 100


@dataclass
class Case:
    """A gateway, its clients and its backends."""

    url: str
    http: httpx.AsyncClient
    # The client of the admin port.
    admin: httpx.AsyncClient
    openai: AsyncOpenAI
    grpc: AsyncClient
    # host:port of gRPC.
    target: str
    cluster: FakeCluster
    config: GatewayConfig
    # Set to drain the gateway.
    stop: asyncio.Event

    async def ready(self) -> bool:
        """Whether the gateway reports that it is ready."""
        try:
            return (await self.http.get("/ready")).status_code == 200
        except httpx.TransportError:
            return False

    @property
    def prompt(self) -> str:
        """The decoded prompt of the first worker's newest request."""
        ids = self.cluster.workers[0].starts[-1].prompt_ids
        return TOKENIZER.decode(list(ids), skip_special_tokens=False)

    def paused(self, at: int) -> FakeWorker:
        """Make the first worker pause after `at` tokens; returns it."""
        worker = self.cluster.workers[0]
        worker.pause_at = at
        return worker

    def refuse(self, message: str, retry_after_s: float | None = None) -> None:
        """Have the scheduler refuse requests because its queue is full."""
        self.cluster.scheduler.refusal = scheduler_pb2.Refusal(
            reason=scheduler_pb2.REFUSAL_REASON_QUEUE_FULL,
            message=message,
            retry_after_s=retry_after_s,
        )

    def stream(self, **fields: Any) -> AbstractAsyncContextManager[httpx.Response]:
        """Send a streamed completion without the OpenAI client."""
        body = {"model": "m", "prompt": "hi", "stream": True} | fields
        return self.http.stream("POST", "/v1/completions", json=body)

    def answer_with(self, text: str) -> None:
        """Set the first worker's output to a text."""
        self.cluster.workers[0].script = lambda _: [*text_ids(text), EOS_ID]

    async def chat(self, **fields: Any) -> httpx.Response:
        """Send a chat request without the OpenAI client."""
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        """Send a completion request without the OpenAI client."""
        return await self.http.post("/v1/completions", json={"model": "m", "prompt": "hi"} | fields)


def named_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names must equal their types."""
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def other_ports(port: int) -> tuple[int, int]:
    """Two free ports other than `port`."""
    ports = {port}
    while len(ports) < 3:
        ports.add(free_port())
    first, second = ports - {port}
    return first, second


@asynccontextmanager
async def gateway_case(
    store: Store,
    model_dir: Path,
    *,
    workers: int = 1,
    max_model_len: int = 256,
    sent_key: str | None = None,
    template: str = CHAT_TEMPLATE,
    capabilities: Sequence[str] = ("generate", "parameter_drop"),
    adapters: adapter_pb2.AdapterLimits | None = None,
    **config_fields: Any,
) -> AsyncIterator[Case]:
    """A ready gateway in front of fakes; `sent_key`: the clients' key, by default `api_key`.

    `template`: the chat template of the model. `capabilities` and `adapters`: those of the workers.

    With a certificate, `http` is the only client that uses TLS.
    """
    write_model_folder(model_dir, template=template)
    record: dict[str, Any] = {"max_model_len": max_model_len, "capabilities": capabilities}
    record["adapters"] = adapters
    async with fake_cluster(store, endless, workers, **record) as cluster:
        fields = {"expected_workers": workers} | config_fields
        async with gateway_before(cluster, model_dir, sent_key, **fields) as case:
            yield case


@asynccontextmanager
async def gateway_before(
    cluster: FakeCluster, model_dir: Path, sent_key: str | None = None, **config_fields: Any
) -> AsyncIterator[Case]:
    """Another ready gateway in front of a cluster; the model's folder must exist."""
    # Selected after the fakes have bound their ports, so that none of them takes it.
    port = free_port()
    admin_port, grpc_port = other_ports(port)
    config = GatewayConfig(
        host="127.0.0.1",
        port=port,
        admin_port=admin_port,
        public_grpc_port=grpc_port,
        etcd_url=cluster.store.url,
        lease_ttl_s=LEASE_TTL_S,
        **({} if "models" in config_fields else {"model_name": "m", "model_dir": model_dir}),
        **config_fields,
    )
    secure = config.http_tls_cert_file is not None
    url = f"http{'s' if secure else ''}://127.0.0.1:{port}"
    target = f"127.0.0.1:{grpc_port}"
    key = sent_key or config.api_key or "none"
    headers = {"authorization": f"Bearer {key}"}
    async with (
        serving(serve, config) as stop,
        # No verification: the certificate is self-signed, or there is none.
        httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, headers=headers, verify=False) as http,
        httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{admin_port}",
            timeout=TIMEOUT_S,
            headers={"x-tideserve-admin": "1"},
            verify=False,
        ) as admin,
        open_client(url, key) as openai,
        AsyncClient(target, api_key=key, timeout_s=TIMEOUT_S) as grpc,
    ):
        case = Case(url, http, admin, openai, grpc, target, cluster, config, stop)
        await eventually(case.ready)
        yield case
