"""Calls that stall in the middle of their message, over raw HTTP/2."""

import asyncio
import struct
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.common.etcd import Store
from services.gateway.grpc import call as call_module
from services.gateway.grpc import call_limits
from services.gateway.grpc.call_limits import READING_MAX
from tests.support.gateway import TIMEOUT_S, gateway_case
from tests.support.http2 import (
    ACK,
    DATA,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    head_of,
    whole_call,
)
from tests.support.waiting import eventually
from tideserve.gateway.v1 import gateway_pb2 as pb
from tideserve.gateway.v1 import gateway_pb2_grpc

CALLS = 3 * READING_MAX
MESSAGE_BYTES = 4 * 2**20


def stalled_call(stream: int, path: str) -> bytes:
    """A call that announces a large message and sends a small part."""
    begun = b"\0" + struct.pack(">I", MESSAGE_BYTES) + b"x" * 100
    return head_of(stream, path) + frame(DATA, 0, stream, begun)


async def next_frame(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[int, int]:
    """Type and stream of the next frame; settings and pings are acknowledged."""
    head = await reader.readexactly(9)
    kind, flags, stream = struct.unpack(">BBI", head[3:])
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    if kind in (SETTINGS, PING) and not flags & ACK:
        writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
    return kind, stream


async def ended_streams(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Wait until the server has reset all calls; returns how many got a status before."""
    ended, reset = set[int](), set[int]()
    while len(reset) < CALLS:
        kind, stream = await next_frame(reader, writer)
        if kind == HEADERS:
            ended.add(stream)
        if kind == RST_STREAM:
            reset.add(stream)
    return len(ended)


async def test_calls_that_stall_in_their_message_end_without_blocking_others(
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


async def test_a_failed_call_of_a_stalled_client_is_logged_and_counted(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "PARKED_MAX", 1)
    async with gateway_case(store, tmp_path / "model") as case:

        async def reported() -> bool:
            rows = (await case.http.get("/metrics")).text.splitlines()
            return any("GatewayService/StreamChat" in row and 'status="499"' in row for row in rows)

        case.paused(20)
        host, _, port = case.target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        small = struct.pack(">HI", INITIAL_WINDOW_SIZE, 10)
        chat = pb.ChatRequest(model="m", options=pb.Options(request_id="chosen"))
        chat.messages.add(role=pb.ROLE_USER, text="hi")
        request = pb.StreamChatRequest(chat=chat).SerializeToString()
        path = "/tideserve.gateway.v1.GatewayService/StreamChat"
        writer.write(PREFACE + frame(SETTINGS, 0, 0, small) + whole_call(1, path, request))
        # The client reads only the beginning of the first message.
        async with asyncio.timeout(TIMEOUT_S):
            while await next_frame(reader, writer) != (DATA, 1):
                pass
        assert await case.grpc.cancel("chosen")
        await eventually(reported)
        async with grpc.aio.insecure_channel(case.target) as channel:
            stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)

            async def refused() -> bool:
                try:
                    await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.UNAVAILABLE
                    return "unread responses" in str(error.details())
                return False

            assert await refused()
            writer.close()

            async def served() -> bool:
                return not await refused()

            await eventually(served)
