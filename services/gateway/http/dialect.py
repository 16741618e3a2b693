"""Differences of the generation endpoints: the body that they read, the form they write."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Receive

from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.bounds.interruption import Interruption
from services.gateway.serving.serving import Writer
from services.gateway.vocabulary.errors import GatewayError

SLICE_BYTES = 64 * 2**10
"""A response is sent in slices of this size; after each the server waits until there is room."""


class StreamWriter(Writer, Protocol):
    """Writes a response in server-sent events."""

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """End the response, which has begun, with an error event.

        A client that does not take it within `timeout_s` learns nothing.
        """


class Dialect(Protocol):
    """One endpoint's form of a request and its response; an object serves one request.

    A dialect and its writers hold nothing of the body but what the response repeats: about
    `kept_bytes` once the body is parsed.
    """

    kept_bytes: int

    def parse(self, data: dict[str, Any]) -> GenerationRequest:
        """What the JSON object in the body asks for; raises GatewayError."""

    def whole(self, client: WatchedClient[Message], body: GenerationRequest) -> Writer:
        """Writes the response to `body`, which asks for no stream."""

    def stream(self, client: WatchedClient[Message], body: GenerationRequest) -> StreamWriter:
        """Writes the response to `body`, which asks for a stream."""


async def send_json(client: WatchedClient[Message], data: dict[str, Any]) -> None:
    """Send a whole response."""
    await send_body(client, msgspec.json.encode(data))


async def send_body(client: WatchedClient[Message], body: bytes) -> None:
    """Send a whole response that is written, and wait until its client has taken a long one.

    The HTTP server buffers whatever it is given at once, without counting the bytes.
    """
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await client.send({"type": "http.response.start", "status": 200, "headers": headers})
    if len(body) <= SLICE_BYTES:
        await client.send({"type": "http.response.body", "body": body})
        return
    for first in range(0, len(body), SLICE_BYTES):
        part = body[first : first + SLICE_BYTES]
        await client.send({"type": "http.response.body", "body": part, "more_body": True})
    await client.send({"type": "http.response.body", "body": b""})


async def hang_up(receive: Receive) -> None:
    """Raise ClientGone when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


@contextlib.asynccontextmanager
async def present(
    client: WatchedClient[Message], receive: Receive, timeout_s: float = math.inf
) -> AsyncIterator[None]:
    """Send to a client without a guard of its own.

    Raises ClientGone if it hangs up, takes nothing, or takes longer than `timeout_s`.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(hang_up(receive))
            with Interruption() as interruption, client.watched(interruption):
                if timeout_s < math.inf:
                    interruption.interrupt_after(timeout_s, ClientGone())
                yield
            guard.cancel()
    except BaseExceptionGroup as group:
        if group.subgroup(ClientGone) is not None:
            raise ClientGone from None
        raise
