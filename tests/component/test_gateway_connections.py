"""HTTP connections with incomplete, oversized or slow requests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from starlette.types import Scope

from services.gateway.config import GatewayConfig
from services.gateway.http import protocol, request_middleware
from services.gateway.http.protocol import (
    INCOMPLETE_BYTES_MAX,
    PIPELINED_BYTES_MAX,
    PIPELINED_MAX,
    BoundedProtocol,
)
from services.gateway.http.request_middleware import HEADER_BYTES_MAX, HEADERS_MAX
from tests.support.gateway import TIMEOUT_S, Case
from tests.support.waiting import eventually

HEADER_TIMEOUT_S = 0.5
UVICORN_KEEP_ALIVE_S = 5
"""Default of the header timeout."""
LIVE = b"GET /live HTTP/1.1\r\nhost: gateway\r\n\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\ncontent-type: application/json\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


@pytest.fixture
def case(case: Case, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(protocol, "HEADER_TIMEOUT_S", HEADER_TIMEOUT_S)
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    return case


@asynccontextmanager
async def connection(
    case: Case, *parts: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a connection and send `parts`."""
    place = urlsplit(case.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        for part in parts:
            writer.write(part)
        async with asyncio.timeout(TIMEOUT_S):
            yield reader, writer
    finally:
        writer.close()


async def until_end(reader: asyncio.StreamReader) -> bytes:
    """Read until the gateway closes the connection."""
    received = b""
    try:
        while part := await reader.read(2**16):
            received += part
    except ConnectionError:
        pass
    return received


async def status(reader: asyncio.StreamReader) -> int:
    """Read the next response; returns its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    sizes = [line.split()[1] for line in head if line.startswith(b"content-length:")]
    await reader.readexactly(int(sizes[0]))
    return int(head[0].split()[1])


async def drip(writer: asyncio.StreamWriter) -> None:
    """Send a byte at intervals."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(HEADER_TIMEOUT_S / 5)


def completion(blanks: int = 0) -> bytes:
    """A request whose body is padded with blanks."""
    body = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 4}).encode() + b" " * blanks
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: gateway\r\n" + head + body


async def test_endless_headers_are_refused(case: Case) -> None:
    long = b"x" * (INCOMPLETE_BYTES_MAX + 1)
    begun = [
        b"GET /live HTTP/1.1\r\nhost: gateway\r\nx: " + long,
        b"GET /live HTTP/1.1\r\n" + b"x: y\r\n" * (len(long) // 6 + 1),
        b"GET /" + long,
    ]
    for part in begun:
        async with connection(case, part) as (reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
            writer.write(b" HTTP/1.1\r\n\r\n" + LIVE)
            assert await until_end(reader) == b"", "nothing more is read"
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "headers_too_large"
    async with connection(case, CHUNKED + b"2\r\n{}\r\n0\r\nx: ", long * 8) as (reader, _):
        assert await until_end(reader) == b"", "trailers of a body are no better"


async def test_slow_requests_time_out(case: Case) -> None:
    answered = b"POST /nowhere HTTP/1.1\r\nhost: gateway\r\ncontent-length: 9999\r\n\r\n"
    async with (
        connection(case) as (silent, _),
        connection(case, b"GET /live HTTP/1.1\r\nx: ") as (header, first),
        connection(case, answered) as (body, second),
        asyncio.TaskGroup() as tasks,
    ):
        dripping = [tasks.create_task(drip(writer)) for writer in (first, second)]
        assert await until_end(silent) == b""
        assert (await until_end(header)).startswith(b"HTTP/1.1 408 ")
        assert (await until_end(body)).startswith(b"HTTP/1.1 404 ")
        for task in dripping:
            task.cancel()


async def test_a_response_may_outlast_the_timeouts_of_later_requests(case: Case) -> None:
    worker = case.paused(1)
    # Its body arrives in many parts, each with its own deadline.
    large = completion(blanks=16 * INCOMPLETE_BYTES_MAX)
    async with connection(case, large, b"\r\n") as (reader, _):
        await eventually(lambda: len(worker.active) == 1)
        await asyncio.sleep(3 * HEADER_TIMEOUT_S)
        worker.go.set()
        assert await status(reader) == 200


async def test_a_kept_connection_stays_open_during_its_next_request(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = case.paused(1)
    begin, begun = BoundedProtocol.connection_made, list[BoundedProtocol]()

    def noted(self: BoundedProtocol, transport: asyncio.Transport) -> None:
        begun.append(self)
        begin(self, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", noted)
    async with connection(case, LIVE) as (reader, writer):
        assert await status(reader) == 200
        (kept,) = begun
        assert kept.timeout_keep_alive_task is not None, "it ends some time"
        writer.write(completion())
        await eventually(lambda: len(worker.active) == 1)
        assert kept.timeout_keep_alive_task is None
        worker.go.set()
        assert await status(reader) == 200


async def test_pipelined_requests_are_limited(case: Case) -> None:
    worker = case.paused(1)
    half = completion(blanks=PIPELINED_BYTES_MAX // 2)
    endings = [
        (LIVE * PIPELINED_MAX, PIPELINED_MAX, False),
        (LIVE * (PIPELINED_MAX + 1), PIPELINED_MAX, True),
        (LIVE + b"no HTTP\r\n\r\n" + LIVE, 1, True),
        (LIVE + half + half + LIVE, 2, True),
        (half + CHUNKED + b"no chunk\r\n", 1, True),
    ]
    for waiting, answered, ends in endings:
        worker.go.clear()
        async with connection(case, completion() + waiting) as (reader, _):
            await eventually(lambda: len(worker.active) == 1)
            worker.go.set()
            assert [await status(reader) for _ in range(1 + answered)] == [200] * (1 + answered)
            if ends:
                assert await until_end(reader) == b"", "all the same its sender had its answers"


async def test_a_disconnect_aborts_the_request_despite_pipelined_ones(case: Case) -> None:
    worker = case.paused(1)
    large = completion(blanks=PIPELINED_BYTES_MAX)
    for waiting in (LIVE, completion(), large, CHUNKED, b"no HTTP\r\n\r\n"):
        for later in (False, True):
            worker.aborted.clear()
            async with connection(case, completion() + (b"" if later else waiting)) as (_, writer):
                await eventually(lambda: len(worker.active) == 1)
                if later:
                    # So that the gateway is waiting both before and after the disconnect.
                    await asyncio.sleep(0.05)
                    writer.write(waiting)
                    await asyncio.sleep(0.05)
            await eventually(lambda: len(worker.aborted) == 1 and not worker.active)


async def test_an_upgrade_offer_is_answered_in_http_1(case: Case) -> None:
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    head, _, body = completion().partition(b"\r\n\r\n")
    first, _, lines = head.partition(b"\r\n")
    sized = first + b"\r\n" + offer + lines + b"\r\n\r\n" + body
    chunked = CHUNKED.replace(b"\r\n", b"\r\n" + offer, 1)
    chunked += b"%x\r\n" % (len(body) - 1) + body[:-1] + b"\r\n1\r\n" + body[-1:] + b"\r\n0\r\n\r\n"
    live = LIVE.replace(b"\r\n", b"\r\n" + offer, 1)
    sent = sized + chunked + live + sized
    async with connection(case, sent) as (reader, _):
        assert [await status(reader) for _ in range(4)] == [200] * 4
    async with connection(case) as (reader, writer):
        for part in (chunked, sized):
            for byte in part:
                writer.write(bytes([byte]))
                await writer.drain()
            assert await status(reader) == 200
    more = b"x: y\r\n" * HEADERS_MAX + offer + b"content-length: %d\r\n" % len(LIVE)
    many = first + b"\r\n" + more + b"\r\n" + LIVE
    async with connection(case, many) as (reader, _):
        answer = await until_end(reader)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert answer.count(b"HTTP/1.1 ") == 1, "its body was taken for a request"


async def test_headers_beyond_the_limit_are_not_stored(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, seen = request_middleware.check_headers, list[tuple[int, int]]()

    def noted(scope: Scope) -> None:
        headers = scope["headers"]
        seen.append((len(headers), sum(len(name) + len(value) for name, value in headers)))
        check(scope)

    monkeypatch.setattr(request_middleware, "check_headers", noted)
    for line in (b"x:\r\n", b"x: " + b"y" * 1000 + b"\r\n"):
        lines = line * (INCOMPLETE_BYTES_MAX // len(line) - 10)
        async with connection(case, LIVE[:-2] + lines + b"\r\n" + LIVE) as (reader, _):
            assert [await status(reader) for _ in range(2)] == [431, 200]

    (count, _), (next_count, _), (_, size), (last_count, _) = seen
    assert count == HEADERS_MAX + 1
    assert (next_count, last_count) == (1, 1), "those of the request before do not count"
    assert HEADER_BYTES_MAX < size <= HEADER_BYTES_MAX + 1001


@pytest.mark.gateway(keep_alive_s=1.0)
async def test_an_idle_connection_is_closed_after_the_configured_time(case: Case) -> None:
    async with connection(case, LIVE) as (reader, _):
        assert await status(reader) == 200
        assert await until_end(reader) == b""


async def test_an_idle_connection_outlasts_uvicorns_default(case: Case) -> None:
    async with connection(case, LIVE) as (reader, writer):
        assert await status(reader) == 200
        await asyncio.sleep(UVICORN_KEEP_ALIVE_S + 1)
        writer.write(LIVE)
        assert await status(reader) == 200


async def test_a_connection_is_kept_once_the_body_of_an_answered_request_arrived(
    case: Case,
) -> None:
    """The response preceded the body, so the header timeout was running and must be cancelled."""
    head = b"POST /nowhere HTTP/1.1\r\nhost: gateway\r\ncontent-length: 5\r\n\r\n"
    async with connection(case, head) as (reader, writer):
        assert await status(reader) == 404
        writer.write(b"hello")
        await asyncio.sleep(3 * HEADER_TIMEOUT_S)
        writer.write(LIVE)
        assert await status(reader) == 200


async def test_the_rest_of_an_answered_request_has_the_header_timeout(case: Case) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nhost: gateway\r\ncontent-length: 5\r\n\r\n"
    async with connection(case, head) as (reader, writer):
        assert await status(reader) == 404
        writer.write(b"he")
        assert await until_end(reader) == b""


def test_idle_connections_outlast_nginxs_default(tmp_path: Path) -> None:
    config = GatewayConfig(etcd_url="e:1", model_name="m", model_dir=tmp_path)
    assert config.keep_alive_s > 60
