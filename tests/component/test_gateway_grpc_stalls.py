"""Calls that stall in the middle of their message, as no library makes them."""

import asyncio
import struct
from pathlib import Path

import pytest

from services.common.etcd import Store
from services.gateway.grpc import call as call_module
from services.gateway.grpc.lobby import READING_MAX
from tests.support.gateway import TIMEOUT_S, gateway_case

CALLS = 3 * READING_MAX
MESSAGE_BYTES = 4 * 2**20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# Of frames in HTTP/2.
DATA, HEADERS, RST_STREAM, SETTINGS, PING = 0, 1, 3, 4, 6
ACK, END_HEADERS = 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header that is spelt out."""
    return b"\0" + b"".join(bytes([len(text)]) + text.encode() for text in (name, value))


def stalled_call(stream: int, path: str) -> bytes:
    """A call that announces a large message and sends a little of it."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "gateway",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(literal(*pair) for pair in headers.items())
    begun = b"\0" + struct.pack(">I", MESSAGE_BYTES) + b"x" * 100
    return frame(HEADERS, END_HEADERS, stream, block) + frame(DATA, 0, stream, begun)


async def ended_streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Wait until the server has reset all calls; how many it told the end of before."""
    told, reset = set[int](), set[int]()
    while len(reset) < CALLS:
        head = await reader.readexactly(9)
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if kind in (SETTINGS, PING) and not flags & ACK:
            writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
        if kind == HEADERS:
            told.add(stream)
        if kind == RST_STREAM:
            reset.add(stream)
    return len(told)


async def test_calls_that_stall_in_their_message_end_and_are_in_nobodys_way(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_module, "MESSAGE_TIMEOUT_S", 0.5)
    async with gateway_case(store, tmp_path / "model", inflight_max=2) as case:
        host, _, port = case.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        for number in range(CALLS):
            path = "/tideserve.gateway.v1.GatewayService/Chat"
            writer.write(stalled_call(2 * number + 1, path))
        ended = asyncio.create_task(ended_streams(reader, writer))
        assert (await case.complete(max_tokens=3)).status_code == 200
        async with asyncio.timeout(TIMEOUT_S):
            assert await ended == CALLS
        answer = await case.grpc.complete("hi", model="m", max_tokens=3)
        assert answer.usage.completion_tokens == 3
        writer.close()
