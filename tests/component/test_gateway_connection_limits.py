"""Limits of connections, bytes of other protocols, and incomplete TLS handshakes."""

import asyncio
import json
import ssl
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.etcd import Store
from services.gateway.bounds import listener
from services.gateway.grpc import relay
from tests.support.certified import DAY, Certified
from tests.support.gateway import TIMEOUT_S, Case, gateway_case
from tests.support.http2 import PREFACE
from tests.support.waiting import eventually
from tideserve.cli.certificates import write_pair
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

ADDRESS_MAX = 8
GARBAGE = 50
Answer = tuple[int, dict[str, str], bytes]


async def exchange(case: Case, method: str, path: str, body: Any = None) -> Answer:
    """Send a request on a new connection; returns status, headers and body."""
    place = urlsplit(case.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    data = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: gateway",
        "content-type: application/json",
        f"content-length: {len(data)}",
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode() + data)
    async with asyncio.timeout(TIMEOUT_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        content = await reader.readexactly(int(headers["content-length"]))
    writer.close()
    return int(head[0].split()[1]), headers, content


async def until_closed(port: int, sent: bytes) -> None:
    """Send bytes on a new connection, and wait until the gateway closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    async with asyncio.timeout(TIMEOUT_S):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()


async def metric(case: Case, sample: str) -> float:
    """A sample of the gateway's metrics; 0 if it is missing."""
    lines = (await case.admin.get("/metrics")).text.splitlines()
    values = [line.rpartition(" ")[2] for line in lines if line.startswith(sample + " ")]
    return float(values[0]) if values else 0.0


async def test_limits_are_logged_at_startup(
    caplog: pytest.LogCaptureFixture, store: Store, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    async with gateway_case(store, tmp_path / "model", connections_per_address_max=ADDRESS_MAX):
        assert f" descriptors, {ADDRESS_MAX} per address" in caplog.text


@pytest.mark.gateway(connections_per_address_max=ADDRESS_MAX)
async def test_beyond_the_limit_of_running_requests_only_probes_are_served(case: Case) -> None:
    worker = case.paused(1)
    completion = {"model": "m", "prompt": "hi", "max_tokens": 3}
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(case.stream(max_tokens=3)) for _ in range(ADDRESS_MAX)
        ]
        for path in ("/live", "/ready", "/health"):
            status, headers, _ = await exchange(case, "GET", path)
            assert (status, headers["connection"]) == (200, "close")
        for path, body in (
            ("/v1/completions", completion),
            ("/v1/chat/completions", {}),
            ("/v1/responses", {}),
            ("/v1/messages", {}),
            ("/tokenize", {}),
        ):
            status, headers, content = await exchange(case, "POST", path, body)
            overloaded = 529 if path == "/v1/messages" else 503
            assert (status, headers["connection"]) == (overloaded, "close")
            assert int(headers["retry-after"]) >= 1
            assert "too many connections" in json.loads(content)["error"]["message"]
        async with grpc.aio.insecure_channel(case.target) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            probe = await health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
            assert probe.status == health_pb2.HealthCheckResponse.SERVING
            stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "too many connections" in str(refused.value.details())
            worker.go.set()
            for stream in streams:
                assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
            # Idle connections are closed to admit the refused one.
            assert await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
    assert (await exchange(case, "POST", "/v1/completions", completion))[0] == 200
    closed = 'tideserve_gateway_connections_closed_total{port="http",reason="idle"}'
    assert await metric(case, closed) >= 3


async def test_bytes_of_another_protocol_are_counted_and_logged_once_per_port(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    place = urlsplit(case.url)
    grpc_port = int(case.target.rpartition(":")[2])
    for port, sent in ((place.port, b"GARBAGE\r\n\r\n"), (grpc_port, b"GET / HTTP/1.1\r\n\r\n")):
        for _ in range(GARBAGE):
            await until_closed(port, sent)
    for port_name in ("http", "grpc"):
        sample = (
            f'tideserve_gateway_connections_closed_total{{port="{port_name}",reason="invalid"}}'
        )
        assert await metric(case, sample) == GARBAGE
    lines = [record for record in caplog.records if record.levelname != "INFO"]
    assert len(lines) == 2
    for port_name, line in zip(("http", "grpc"), lines, strict=True):
        assert f"to the {port_name} port: its client does not speak" in line.getMessage()


async def test_tls_handshakes_and_prefaces_have_a_deadline(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(relay, "PREFACE_TIMEOUT_S", 0.5)
    certified = Certified(tmp_path)
    write_pair(tmp_path, "http", certified.authority.issue("http", ("127.0.0.1",), DAY))
    secure = {
        "http_tls_cert_file": tmp_path / "http.pem",
        "http_tls_key_file": tmp_path / "http-key.pem",
    }
    async with gateway_case(store, tmp_path / "model", **secure) as case:
        ports = [urlsplit(case.url).port, int(case.target.rpartition(":")[2])]
        half_a_hello = bytes.fromhex("160301020001")
        for port in ports:
            assert port is not None
            for sent in (b"", half_a_hello, b"GET / HTTP/1.1\r\n\r\n"):
                await until_closed(port, sent)
        for name in ("http", "grpc"):
            sample = (
                f'tideserve_gateway_connections_closed_total{{port="{name}",reason="handshake"}}'
            )
            assert await metric(case, sample) == 3
        # After the handshake, gRPC's clients must send the preface.
        trust = ssl.create_default_context(cafile=certified.ca_file)
        trust.set_alpn_protocols(["h2"])
        for sent in (b"", PREFACE[:-1]):
            reader, writer = await asyncio.open_connection("127.0.0.1", ports[1], ssl=trust)
            writer.write(sent)
            async with asyncio.timeout(TIMEOUT_S):
                assert await reader.read() == b""
            writer.close()

        async def all_gone() -> bool:
            return await metric(case, 'tideserve_gateway_connections{port="grpc"}') == 0

        await eventually(all_gone)
