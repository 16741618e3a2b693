"""Server-sent events to one client, and what is sent when."""

import contextlib
from functools import partial
from typing import Any

import msgspec
from starlette.types import Message

from services.common.timeouts import timeout
from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.format import Format, envelope_of, usage_body
from services.gateway.serving.output import OutputPiece, Usage, numbers_in
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import GatewayError

DONE = b"data: [DONE]\n\n"
_NO_CHOICES = b'"choices":[]'
"""In JSON no text looks so: a quote within one has a backslash before it."""
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
    """Sends events in the order in which they come; the first ones start the response."""

    def __init__(self, client: WatchedClient[Message]) -> None:
        self._client = client

    async def send(self, events: bytes, last: bool = False) -> None:
        """Send events; after the `last` ones there is nothing more to come."""
        if not self._client.started:
            await self._client.send(
                {"type": "http.response.start", "status": 200, "headers": HEADERS}
            )
        await self._client.send(
            {"type": "http.response.body", "body": events, "more_body": not last}
        )

    async def send_final(self, events: bytes, timeout_s: float) -> None:
        """End the response; a client that does not take the events in that time learns nothing."""
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                await self.send(events, last=True)


class EventStream:
    """A Writer of the events of one streamed response of the OpenAI API; choices may take turns."""

    def __init__(
        self,
        client: WatchedClient[Message],
        layout: Format,
        body: GenerationRequest,
        pool: TextPool,
    ) -> None:
        self._pool = pool
        self._channel = EventChannel(client)
        self._layout = layout
        self._tier = body.service_tier
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._opened: set[int] = set()

    def begin(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._envelope = envelope_of(prepared, self._tier)
        # Output tokens of each choice.
        self._counts = [0] * len(prepared.choices)
        # All events but those with counts have the same around their one choice.
        before, choices, after = event(self._around([])).partition(_NO_CHOICES)
        self._head, self._tail = before + choices[:-1], choices[-1:] + after

    async def piece(self, index: int, piece: OutputPiece) -> None:
        """Send new output of a choice; the first one starts the response."""
        data = b"" if index in self._opened else self._open(index)
        self._counts[index] += len(piece.token_ids)
        if self._has_event(piece):
            if piece.prompt_logprobs:
                write = partial(self._written, index, piece)
                data += await self._pool.run(write, numbers_in(piece.prompt_logprobs))
            else:
                data += self._written(index, piece)
        if data:
            await self._channel.send(data)

    def _has_event(self, piece: OutputPiece) -> bool:
        counted = self._continuous_usage and bool(piece.token_ids)
        return piece.finish_reason is not None or counted or self._layout.tells(piece)

    def _written(self, index: int, piece: OutputPiece) -> bytes:
        choice = self._layout.chunk(index, piece)
        if self._continuous_usage:
            return event(self._chunk(choice))
        return self._head + msgspec.json.encode(choice) + self._tail

    def _open(self, index: int) -> bytes:
        """What comes before the output of a choice."""
        prepared, first = self._prepared, not self._opened
        self._opened.add(index)
        opening = self._layout.opening(index, prepared.choices[index])
        if opening is None:
            return b""
        return event(self._chunk(opening) | (self._layout.beside(prepared, ()) if first else {}))

    async def finish(self, usage: Usage) -> None:
        """Send what follows the last choice, and end the response."""
        tail = DONE
        if self._include_usage:
            chunk = self._envelope.wrap(self._layout.chunk_kind, [])
            tail = event(chunk | {"usage": usage_body(usage)}) + DONE
        await self._channel.send(tail, last=True)

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """End the response with an error event and without the closing mark."""
        await self._channel.send_final(event(error.body()), timeout_s)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._around([choice])
        if self._continuous_usage:
            chunk["usage"] = self._usage(choice["index"])
        return chunk

    def _around(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope.wrap(self._layout.chunk_kind, choices)
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self, index: int) -> dict[str, Any]:
        """The usage of one choice so far; the last event counts all choices."""
        prompt_tokens = len(self._prepared.choices[index].request.prompt_ids)
        return usage_body(Usage(prompt_tokens, self._counts[index]))
