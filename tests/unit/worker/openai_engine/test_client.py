"""The client of upstream servers with invalid responses."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.worker.openai_engine.client import (
    RETRY_AFTER_MAX_S,
    RETRY_AFTER_MIN_S,
    RETRY_AFTER_S,
    TokenDeadline,
    UpstreamClient,
)
from services.worker.openai_engine.errors import UpstreamBusy, UpstreamLost, UpstreamRefused

NESTED = b'{"error": ' + b"[" * 100_000


class RawServer:
    """Answers each request on `url` with `answer`, then closes; keeps the requests' headers."""

    def __init__(self) -> None:
        self.answer = b""
        self.requests: list[bytes] = []
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()
        writer.close()


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    raw = RawServer()
    async with await asyncio.start_server(raw.serve, "127.0.0.1", 0) as listener:
        raw.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield raw


@pytest.fixture
async def client(server: RawServer) -> AsyncIterator[UpstreamClient]:
    made = UpstreamClient(server.url)
    yield made
    await made.close()


def answer(status: str, content: bytes, *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status}", "Connection: close", *headers, "", "")
    return "\r\n".join(lines).encode() + content


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("0", RETRY_AFTER_MIN_S), ("-3", RETRY_AFTER_MIN_S), ("nan", RETRY_AFTER_MIN_S)),
        *(("inf", RETRY_AFTER_MAX_S), ("2", 2.0)),
        ("Wed, 21 Oct 2026 07:28:00 GMT", RETRY_AFTER_S),
    ],
)
async def test_a_full_server_is_not_retried_at_once(
    server: RawServer, client: UpstreamClient, header: str, seconds: float
) -> None:
    server.answer = answer("429 Too Many Requests", b"", f"Retry-After: {header}")
    with pytest.raises(UpstreamBusy) as raised:
        await client.answer("/v1/completions", {}, 10)
    assert raised.value.retry_after_s == seconds


async def test_deeply_nested_json_is_invalid(server: RawServer, client: UpstreamClient) -> None:
    server.answer = answer("200 OK", NESTED)
    with pytest.raises(UpstreamLost, match="sent invalid JSON"):
        await client.answer("/v1/completions", {}, 10)
    server.answer = answer("400 Bad Request", NESTED)
    with pytest.raises(UpstreamRefused, match=r"refused the request: \{"):
        await client.answer("/v1/completions", {}, 10)
    server.answer = answer(
        "200 OK", b"data: " + NESTED + b"\n\n", "Content-Type: text/event-stream"
    )
    with pytest.raises(UpstreamLost, match="sent invalid JSON"):
        async for event in client.events("/v1/completions", {}, TokenDeadline(10, 10)):
            raise AssertionError(event)


async def test_cookies_are_not_returned(server: RawServer, client: UpstreamClient) -> None:
    server.answer = answer("200 OK", b"{}", "Set-Cookie: balancer=replica-1; Path=/")
    for _ in range(2):
        await client.get("/v1/models", 10)
    assert len(server.requests) == 2
    assert not any(b"cookie" in request.lower() for request in server.requests)
