"""The relay in front of gRPC's server, with a server that returns the metadata of a call."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import uvloop

from services.gateway.bounds.connections import ClientConnections, ConnectionLimits
from services.gateway.grpc.relay import CONNECTION_HEADER, Relay
from tests.support.waiting import eventually

ECHO = "/test.Echo/Echo"
LARGE = 8 * 2**20
OPTIONS = (("grpc.max_receive_message_length", 2 * LARGE), ("grpc.use_local_subchannel_pool", 1))


class Echo(grpc.GenericRpcHandler):
    """Returns the numbers of the call's connection, then what the client sends."""

    def service(self, handler_call_details: Any) -> Any:
        metadata = handler_call_details.invocation_metadata
        numbers = [value for key, value in metadata if key == CONNECTION_HEADER]

        async def echo(requests: Any, context: Any) -> AsyncIterator[bytes]:
            yield json.dumps(numbers).encode()
            async for request in requests:
                yield request

        return grpc.stream_stream_rpc_method_handler(echo)


@asynccontextmanager
async def relayed(folder: Path, connections: ClientConnections) -> AsyncIterator[tuple[str, Relay]]:
    """The address of a relay in front of a server."""
    server = grpc.aio.server(handlers=(Echo(),), options=OPTIONS)
    server.add_insecure_port(f"unix:{folder}/grpc")
    await server.start()
    relay = Relay(connections, None)
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    relay.start(listening, f"{folder}/grpc")
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}", relay
    finally:
        relay.refuse()
        await server.stop(0)
        await relay.close()


async def echoed(channel: grpc.aio.Channel, message: bytes, **metadata: str) -> list[str]:
    """The numbers of the call's connection; the message must come back."""
    call: Any = channel.stream_stream(ECHO)(metadata=tuple(metadata.items()))
    numbers = json.loads(await call.read())
    await call.write(message)
    await call.done_writing()
    assert await call.read() == message
    assert await call.read() is grpc.aio.EOF
    return [str(number) for number in numbers]


async def scenario(folder: Path) -> None:
    connections = ClientConnections(ConnectionLimits(all_max=60, address_max=60))
    async with relayed(folder, connections) as (target, relay):
        async with (
            grpc.aio.insecure_channel(target, options=OPTIONS) as first,
            grpc.aio.insecure_channel(target, options=OPTIONS) as second,
        ):
            (one,) = await echoed(first, b"x" * LARGE)
            forged = await echoed(second, b"hi", **{CONNECTION_HEADER: one})
            assert forged[0] == one and forged[-1] != one, "the relay's header is the last"
            assert await echoed(first, b"hi", **{"x" * 200: "y" * 4000}) == [one]
            assert relay.connection({CONNECTION_HEADER: one}).address == "127.0.0.1"
            assert not relay.connection({}).admit()
            assert connections.count("grpc") == 2
        await eventually(lambda: connections.count("grpc") == 0)


async def test_calls_pass_with_the_number_of_their_connection(tmp_path: Path) -> None:
    await scenario(tmp_path)


def test_calls_pass_in_the_loop_of_the_services(tmp_path: Path) -> None:
    uvloop.run(scenario(tmp_path))


def test_connections_that_make_room_in_a_burst_end_whole(tmp_path: Path) -> None:
    """In the loop of the services, whose transports can end before their protocol knows them."""

    async def burst() -> None:
        connections = ClientConnections(ConnectionLimits(all_max=12, address_max=12))
        async with relayed(tmp_path, connections) as (target, _):
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
