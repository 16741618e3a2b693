"""The address that the HTTP server listens at."""

import asyncio
import socket

from services.gateway.http.server import bind


async def test_response_parts_are_sent_without_waiting_for_acknowledgements() -> None:
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[asyncio.BaseTransport] = loop.create_future()

    class Noted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            accepted.set_result(transport)

    listener = bind("127.0.0.1", 0, 5.0)
    async with await loop.create_server(Noted, sock=listener):
        with socket.create_connection(listener.getsockname()):
            transport = await accepted
            connection = transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()
