"""The interface of dialects, and how they send their responses.

A dialect is the request and response format of a generation endpoint, such as /v1/messages.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec
from starlette.types import Message, Receive

from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.cancel_scope import CancelScope
from services.gateway.bounds.client import ClientGone, WatchedClient
from services.gateway.serving.serving import Writer
from services.gateway.vocabulary.errors import GatewayError

SLICE_BYTES = 64 * 2**10
"""Bytes per slice of a long response; the server waits for buffer room after each slice."""


class StreamWriter(Writer, Protocol):
    """Writes a response as server-sent events."""

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """End a started response with an error event; give up after `timeout_s`."""


class Dialect(Protocol):
    """The request and response format of an endpoint. Each instance serves a single request.

    A dialect and its writers retain only the parts of the body that the response repeats. These
    take about `kept_bytes`, which is set once the body is parsed.
    """

    kept_bytes: int

    def parse(self, data: dict[str, Any]) -> GenerationRequest:
        """Parse the body's JSON object. Raises GatewayError."""

    def whole(self, client: WatchedClient[Message], body: GenerationRequest) -> Writer:
        """The writer of a response that is not streamed."""

    def stream(self, client: WatchedClient[Message], body: GenerationRequest) -> StreamWriter:
        """The writer of a streamed response."""


async def send_json(client: WatchedClient[Message], data: dict[str, Any]) -> None:
    """Send a JSON response."""
    await send_body(client, msgspec.json.encode(data))


async def send_body(client: WatchedClient[Message], body: bytes) -> None:
    """Send a serialised JSON response; a long response waits for its client to read it."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    await client.send({"type": "http.response.start", "status": 200, "headers": headers})
    if len(body) <= SLICE_BYTES:
        await client.send({"type": "http.response.body", "body": body})
        return
    # In slices: the HTTP server buffers a single message of any size.
    for first in range(0, len(body), SLICE_BYTES):
        part = body[first : first + SLICE_BYTES]
        await client.send({"type": "http.response.body", "body": part, "more_body": True})
    await client.send({"type": "http.response.body", "body": b""})


async def wait_for_disconnect(receive: Receive) -> None:
    """Raise ClientGone when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone


@contextlib.asynccontextmanager
async def guard_client(
    client: WatchedClient[Message], receive: Receive, timeout_s: float = math.inf
) -> AsyncIterator[None]:
    """Cancel the block, which sends to `client`, when the client is gone.

    Raises:
        ClientGone: if the client disconnects, stalls, or takes longer than `timeout_s`.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(wait_for_disconnect(receive))
            with CancelScope() as cancel_scope, client.watched(cancel_scope):
                if timeout_s < math.inf:
                    cancel_scope.cancel_after(timeout_s, ClientGone())
                yield
            guard.cancel()
    except BaseExceptionGroup as group:
        # Unwrap the task group's exception: callers expect a plain ClientGone.
        if group.subgroup(ClientGone) is not None:
            raise ClientGone from None
        raise
