"""Encodes server-sent events and streams the responses of the OpenAI API.

An envelope holds the fields that all events of a response share, around the choices.
"""

import contextlib
from functools import partial
from typing import Any

import msgspec
from starlette.types import Message

from services.common.timeouts import timeout
from services.gateway.api.generation import GenerationRequest
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.format import Format, envelope_of, usage_body
from services.gateway.serving.output import OutputPiece, Usage, count_logprobs
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.errors import GatewayError

DONE = b"data: [DONE]\n\n"
_NO_CHOICES = b'"choices":[]'
"""Splits an encoded envelope. No JSON string contains these bytes, since quotes are escaped."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Disables nginx's buffering of the stream.
    (b"x-accel-buffering", b"no"),
)


def event(data: dict[str, Any]) -> bytes:
    """Encode a server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


def typed_event(data: dict[str, Any]) -> bytes:
    """Encode a server-sent event named after its type."""
    return b"event: " + data["type"].encode() + b"\n" + event(data)


class EventChannel:
    """Sends events to a client; the first events start the response."""

    def __init__(self, client: WatchedClient[Message]) -> None:
        self._client = client

    async def send(self, events: bytes, last: bool = False) -> None:
        """Send events; `last` ends the response."""
        if not self._client.started:
            await self._client.send(
                {"type": "http.response.start", "status": 200, "headers": HEADERS}
            )
        await self._client.send(
            {"type": "http.response.body", "body": events, "more_body": not last}
        )

    async def send_final(self, events: bytes, timeout_s: float) -> None:
        """Send the last events; give up after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with timeout(timeout_s):
                await self.send(events, last=True)


class EventStream:
    """A StreamWriter of the OpenAI API; the events of several choices may interleave."""

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
        self._layout.begin(prepared)
        self._envelope = envelope_of(prepared, self._tier)
        # Output tokens of each choice.
        self._counts = [0] * len(prepared.choices)
        # Encode the envelope once: all events without usage share it.
        before, choices, after = event(self._wrapped([])).partition(_NO_CHOICES)
        self._head, self._tail = before + choices[:-1], choices[-1:] + after

    async def piece(self, index: int, piece: OutputPiece) -> None:
        """Send output of a choice; the first piece starts the response."""
        data = b"" if index in self._opened else self._open(index)
        self._counts[index] += len(piece.token_ids)
        if self._has_event(piece):
            if piece.prompt_logprobs:
                write = partial(self._encoded, index, piece)
                data += await self._pool.run(write, count_logprobs(piece.prompt_logprobs))
            else:
                data += self._encoded(index, piece)
        if data:
            await self._channel.send(data)

    def _has_event(self, piece: OutputPiece) -> bool:
        counted = self._continuous_usage and bool(piece.token_ids)
        return piece.finish_reason is not None or counted or self._layout.has_event(piece)

    def _encoded(self, index: int, piece: OutputPiece) -> bytes:
        choice = self._layout.chunk(index, piece)
        if self._continuous_usage:
            return event(self._chunk(choice))
        return self._head + msgspec.json.encode(choice) + self._tail

    def _open(self, index: int) -> bytes:
        """The events before the output of a choice."""
        prepared, first = self._prepared, not self._opened
        self._opened.add(index)
        opening = self._layout.opening(index, prepared.choices[index])
        if opening is None:
            return b""
        return event(
            self._chunk(opening) | (self._layout.extra_fields(prepared, ()) if first else {})
        )

    async def finish(self, usage: Usage) -> None:
        """Send the usage and the end mark; end the response."""
        tail = DONE
        if self._include_usage:
            chunk = self._envelope.wrap(self._layout.chunk_kind, [])
            tail = event(chunk | {"usage": usage_body(usage)}) + DONE
        await self._channel.send(tail, last=True)

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """End the response with an error event and without the end mark."""
        await self._channel.send_final(event(error.body()), timeout_s)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = self._wrapped([choice])
        if self._continuous_usage:
            chunk["usage"] = self._usage(choice["index"])
        return chunk

    def _wrapped(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._envelope.wrap(self._layout.chunk_kind, choices)
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _usage(self, index: int) -> dict[str, Any]:
        """The usage of a choice so far; the last event has the usage of all choices."""
        prompt_tokens = len(self._prepared.choices[index].request.prompt_ids)
        return usage_body(Usage(prompt_tokens, self._counts[index]))
