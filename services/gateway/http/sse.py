"""Server-sent events to one client, and what is sent when."""

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.types import Message

from services.common.timeouts import timeout
from services.gateway.client import Client
from services.gateway.errors import GatewayError
from services.gateway.http.format import Envelope, Format, usage_body
from services.gateway.output import Piece, Usage
from services.gateway.prepared import PreparedRequest

DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """One server-sent event with a name, which is its type."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


class EventChannel:
    """Sends events one after the other; the first ones start the response."""

    def __init__(self, client: Client[Message]) -> None:
        self._client = client
        self._turn = asyncio.Lock()

    async def send(self, events: bytes, last: bool = False) -> None:
        """Send events; after the `last` ones there is nothing more to come."""
        async with self._turn:
            if not self._client.started:
                await self._client.send(
                    {"type": "http.response.start", "status": 200, "headers": HEADERS}
                )
            await self._client.send(
                {"type": "http.response.body", "body": events, "more_body": not last}
            )

    async def send_farewell(self, events: bytes, timeout_s: float) -> None:
        """End the response; a client that does not take the events in that time learns nothing."""
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                await self.send(events, last=True)


class EventStream:
    """The events of one streamed response of the OpenAI API; choices may take turns."""

    def __init__(self, client: Client[Message], layout: Format, include_usage: bool) -> None:
        self._channel = EventChannel(client)
        self._layout = layout
        self._include_usage = include_usage
        self._opened: set[int] = set()

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""
        self._envelope = Envelope(prepared.response_id, prepared.created, prepared.model)

    async def piece(self, index: int, piece: Piece) -> None:
        """Send new output of a choice; the first one starts the response."""
        choices = []
        if index not in self._opened:
            self._opened.add(index)
            opening = self._layout.opening(index)
            choices += [opening] if opening is not None else []
        # Also tokens whose text is still to come: clients see that the answer goes on.
        if piece.text or piece.token_ids or piece.finish_reason is not None:
            choices.append(self._layout.delta(index, piece.text, piece.finish_reason))
        if choices:
            await self._channel.send(b"".join(event(self._chunk(choice)) for choice in choices))

    async def finish(self, usage: Usage) -> None:
        """Send what follows the last choice, and end the response."""
        tail = DONE
        if self._include_usage:
            chunk = self._envelope.wrap(self._layout.chunk_kind, [])
            tail = event(chunk | {"usage": usage_body(usage)}) + DONE
        await self._channel.send(tail, last=True)

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """End the response with an error event and without the closing mark."""
        await self._channel.send_farewell(event(error.body()), timeout_s)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._envelope.wrap(self._layout.chunk_kind, [choice])
        return chunk | {"usage": None} if self._include_usage else chunk
