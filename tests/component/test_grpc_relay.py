"""The relay in front of a gRPC server that returns a call's metadata."""

import asyncio
import gc
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc.aio
import pytest
import uvloop

from services.gateway.bounds.connections import ClientConnections, CloseReason, ConnectionLimits
from services.gateway.grpc import relay as relay_module
from services.gateway.grpc.relay import CONNECTION_HEADER, Relay
from tests.support.gateway import TIMEOUT_S
from tests.support.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    block_of,
    frame,
    literal,
)
from tests.support.waiting import eventually

ECHO = "/test.Echo/Echo"
LIMITS = ConnectionLimits(all_max=60, address_max=60, restricted_max=6)
LARGE = 8 * 2**20
OPTIONS = (("grpc.max_receive_message_length", 2 * LARGE), ("grpc.use_local_subchannel_pool", 1))


class Echo(grpc.GenericRpcHandler):
    """Returns the tokens of the call's connection, then echoes the client's messages."""

    def service(self, handler_call_details: Any) -> Any:
        metadata = handler_call_details.invocation_metadata
        tokens = [value for key, value in metadata if key == CONNECTION_HEADER]

        async def echo(requests: Any, context: Any) -> AsyncIterator[bytes]:
            yield json.dumps(tokens).encode()
            async for request in requests:
                yield request

        return grpc.stream_stream_rpc_method_handler(echo)


@asynccontextmanager
async def relayed(connections: ClientConnections) -> AsyncIterator[tuple[str, Relay]]:
    """The address of a relay in front of a server."""
    server = grpc.aio.server(handlers=(Echo(),), options=OPTIONS)
    name = f"tideserve-test-{secrets.token_hex(8)}"
    server.add_insecure_port(f"unix-abstract:{name}")
    await server.start()
    relay = Relay(connections, None)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    relay.start(listening, name)
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}", relay
    finally:
        relay.refuse()
        await server.stop(0)
        await relay.close()


async def echoed(channel: grpc.aio.Channel, message: bytes, **metadata: str) -> list[str]:
    """The tokens of the call's connection; the message must be echoed."""
    call: Any = channel.stream_stream(ECHO)(metadata=tuple(metadata.items()))
    tokens = json.loads(await call.read())
    await call.write(message)
    await call.done_writing()
    assert await call.read() == message
    assert await call.read() is grpc.aio.EOF
    return [str(number) for number in tokens]


async def scenario() -> None:
    connections = ClientConnections(LIMITS)
    async with relayed(connections) as (target, relay):
        async with (
            grpc.aio.insecure_channel(target, options=OPTIONS) as first,
            grpc.aio.insecure_channel(target, options=OPTIONS) as second,
        ):
            (token,) = await echoed(first, b"x" * LARGE)
            forged = await echoed(second, b"hi", **{CONNECTION_HEADER: token})
            assert forged[0] == token and forged[-1] != token, "the relay's header is the last"
            assert await echoed(first, b"hi", **{"x" * 200: "y" * 4000}) == [token]
            assert relay.connection({CONNECTION_HEADER: token}).address == "127.0.0.1"
            assert not relay.connection({}).admit()
            assert connections.count("grpc") == 2
        await eventually(lambda: connections.count("grpc") == 0)


async def test_calls_carry_the_token_of_their_connection() -> None:
    await scenario()


def test_calls_pass_in_the_loop_of_the_services() -> None:
    uvloop.run(scenario())


def swallowing(token: str, size: int) -> bytes:
    """A call with a forged token; its last header ends with a relay's header of such a token.

    The name of the header ends in -bin, and its value begins with a null byte, so any bytes are
    allowed.
    """
    relayed_bytes = 2 + len(CONNECTION_HEADER) + 1 + size
    last = b"\x10\x05x-bin" + bytes([1 + relayed_bytes]) + b"\0"
    block = block_of(ECHO) + literal(CONNECTION_HEADER, token) + last
    called = frame(HEADERS, END_HEADERS, 1, block) + frame(DATA, END_STREAM, 1, bytes(5))
    return PREFACE + frame(SETTINGS, 0, 0) + called


async def received(target: str, sent: bytes) -> list[str]:
    """The tokens of a call; empty if the server refuses its headers."""
    host, _, port = target.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                head = await reader.readexactly(9)
                data = await reader.readexactly(int.from_bytes(head[:3]))
                if head[3] == DATA and data:
                    tokens: list[str] = json.loads(data[5:])
                    return tokens
    except asyncio.IncompleteReadError:
        return []
    finally:
        writer.close()


@pytest.mark.parametrize(("token", "size"), [("1", 1), ("1" * 32, 32)])
async def test_a_header_that_swallows_the_token_removes_it(token: str, size: int) -> None:
    async with (
        relayed(ClientConnections(LIMITS)) as (target, relay),
        grpc.aio.insecure_channel(target, options=OPTIONS) as honest,
    ):
        # The first connection of the relay.
        assert await echoed(honest, b"hi")
        tokens = await received(target, swallowing(token, size))
        assert tokens in ([], [token])
        assert not relay.connection({CONNECTION_HEADER: token}).admit()
    assert size == 1 or tokens, "the relay's header was swallowed"


@pytest.mark.parametrize(
    "begun",
    [
        frame(HEADERS, 0, 1, block_of(ECHO)),
        frame(HEADERS, 0, 1, block_of(ECHO)) + frame(CONTINUATION, END_HEADERS, 1, b"x" * 9)[:-1],
        frame(HEADERS, END_HEADERS, 1, block_of(ECHO))[:-1],
    ],
)
async def test_header_blocks_have_a_deadline(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(relay_module, "BLOCK_TIMEOUT_S", 0.5)
    reasons = list[str]()
    connections = ClientConnections(LIMITS, lambda port, reason: reasons.append(reason))
    async with (
        relayed(connections) as (target, _),
        grpc.aio.insecure_channel(target, options=OPTIONS) as honest,
    ):
        # Its header block is complete, so its connection stays.
        call: Any = honest.stream_stream(ECHO)()
        assert await call.read()
        assert await received(target, PREFACE + frame(SETTINGS, 0, 0) + begun) == []
        await call.write(b"hi")
        assert await call.read() == b"hi"
        call.cancel()
    assert reasons == [CloseReason.HEADERS]


def test_connections_evicted_in_a_burst_close_cleanly() -> None:
    """On uvloop, whose transports may close before their protocol is connected."""

    async def burst() -> None:
        connections = ClientConnections(ConnectionLimits(12, 12, restricted_max=12))
        async with relayed(connections) as (target, _):
            host, _, port = target.rpartition(":")
            opened = await asyncio.gather(
                *(asyncio.open_connection(host, int(port)) for _ in range(100))
            )
            for reader, _ in opened[:-4]:
                assert await reader.read() == b""
            for _, writer in opened:
                writer.close()
            await eventually(lambda: connections.count("grpc") == 0)

    uvloop.run(burst())


class Aborting(asyncio.Protocol):
    """Aborts its connection when made, as the relay does for a client that has disconnected."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.abort()


async def abort_at_once() -> None:
    """Check that an aborted connection's descriptor is closed once: its next owner keeps it."""
    name = f"tideserve-test-{secrets.token_hex(8)}"
    loop = asyncio.get_running_loop()
    async with await loop.create_unix_server(asyncio.Protocol, f"\0{name}"):
        aborting = [Aborting()]
        await relay_module._connect(name, lambda: aborting[0])
        await asyncio.sleep(0.01)
        # Numbers of closed descriptors are reused, lowest first.
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
        aborting.clear()
        gc.collect()
        for file in files:
            os.close(file)


def test_a_connection_that_ends_at_once_closes_no_other_file() -> None:
    uvloop.run(abort_at_once())
