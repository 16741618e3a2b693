"""Serves Anthropic's Messages API: routes and response JSON, streamed and complete."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message

from services.core.service import ServiceClass
from services.gateway.api.chat import ChatRequest
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.messages import (
    FIELDS,
    CountTokensRequest,
    MessagesRequest,
    parse_count,
    parse_messages,
)
from services.gateway.bounds.client import WatchedClient
from services.gateway.http.description import describe_body
from services.gateway.http.dialect import StreamWriter, send_json
from services.gateway.http.messages_error import SCHEMA, error_body
from services.gateway.http.response import GenerationResponse
from services.gateway.http.sse import EventChannel, typed_event
from services.gateway.http.tokens import ComputedResponse, Content
from services.gateway.records.request_record import record_of
from services.gateway.serving.output import OutputPiece, Usage
from services.gateway.serving.prepared import PreparedRequest
from services.gateway.serving.serving import RequestServing, Writer
from services.gateway.text.tokenizer import TextPool
from services.gateway.vocabulary.delta import TOOL_CALLS, ToolCallDelta
from services.gateway.vocabulary.errors import GatewayError

Event = dict[str, Any]
INVALID_INPUT = "INVALID_JSON"
"""Key under which tool arguments that are not valid JSON are sent as text."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", TOOL_CALLS: "tool_use"}
_SERVICE_TIERS = {
    ServiceClass.INTERACTIVE: "priority",
    ServiceClass.STANDARD: "standard",
    ServiceClass.BATCH: "batch",
}
_EMPTY = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessagesDialect:
    """The Dialect of /v1/messages."""

    def __init__(self, parse: Callable[[dict[str, Any]], GenerationRequest]) -> None:
        self.parse = parse
        self.kept_bytes = 0

    def whole(self, client: WatchedClient[Message], body: GenerationRequest) -> Writer:
        return WholeMessage(client)

    def stream(self, client: WatchedClient[Message], body: GenerationRequest) -> StreamWriter:
        return MessageStream(client)


class MessageBuilder:
    """Builds a message and its stream events from output pieces. No I/O."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._blocks: list[_ContentBlock] = []
        self._open: _ContentBlock | None = None
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self) -> Event:
        """The first event."""
        return {"type": "message_start", "message": self.message(self._no_output)}

    def push(self, piece: OutputPiece) -> list[Event]:
        """Add output; return its events."""
        delta, events = piece.parsed, list[Event]()
        if delta.reasoning:
            events += self._append("thinking", delta.reasoning)
        if delta.content:
            events += self._append("text", delta.content)
        for call in delta.tool_calls:
            events += self._call(call)
        if delta.finish_reason is not None:
            self._stop_reason = _STOP_REASONS[delta.finish_reason]
            # Anthropic's API has a separate stop reason for stop strings.
            if isinstance(piece.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", piece.stop_reason
        return events

    def end(self, usage: Usage) -> list[Event]:
        """The last events, after all output."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage_body(usage)},
            {"type": "message_stop"},
        ]

    def message(self, usage: Usage) -> dict[str, Any]:
        """The message with the output so far."""
        return {
            "id": self._prepared.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model,
            "content": [block.whole() for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": _usage_body(usage)
            | {"service_tier": _SERVICE_TIERS[self._prepared.service_class]},
        }

    @property
    def _no_output(self) -> Usage:
        return Usage(self._prepared.prompt_tokens, 0)

    def _append(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open is None or self._open.kind != kind:
            events += self._start(_ContentBlock(len(self._blocks), kind, _EMPTY[kind]))
        assert self._open is not None
        return [*events, self._open.append(text)]

    def _call(self, delta: ToolCallDelta) -> list[Event]:
        events = []
        if delta.id:
            fields = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            events += self._start(_ContentBlock(len(self._blocks), "tool_use", fields))
        assert self._open is not None, "a call's block stays open until the call ends"
        if delta.arguments:
            events.append(self._open.append(delta.arguments))
        return events + (self._close() if delta.ended else [])

    def _start(self, block: "_ContentBlock") -> list[Event]:
        events = self._close()
        self._blocks.append(block)
        self._open = block
        return [*events, block.opening()]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        index, self._open = self._open.index, None
        return [{"type": "content_block_stop", "index": index}]


def _usage_body(usage: Usage) -> dict[str, int]:
    """Anthropic's usage object, whose input tokens exclude cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class _ContentBlock:
    """A content block: the JSON of the `empty` block, and the text or JSON added since."""

    def __init__(self, index: int, kind: str, empty: dict[str, Any]) -> None:
        self.index = index
        self.kind = kind
        self._empty = empty
        self._texts: list[str] = []

    def opening(self) -> Event:
        """The event that starts the block."""
        return {"type": "content_block_start", "index": self.index, "content_block": self._empty}

    def append(self, text: str) -> Event:
        """Add text or JSON; return its event."""
        self._texts.append(text)
        kind, field = _DELTAS[self.kind]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def whole(self) -> dict[str, Any]:
        """The block with its content so far."""
        text = "".join(self._texts)
        value = _input(text) if self.kind == "tool_use" else text
        return self._empty | {"input" if self.kind == "tool_use" else self.kind: value}


def _input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """The arguments of a tool call as the model wrote them, without conversion of numbers.

    Arguments of a truncated call are not valid JSON: they become text under `INVALID_INPUT`, as in
    Anthropic's documentation of fine-grained tool streaming.
    """
    if not arguments:
        return {}
    try:
        # Only validate; integers may exceed the length that Python converts.
        json.loads(arguments, parse_int=str)
    except ValueError:
        return {INVALID_INPUT: arguments}
    return msgspec.Raw(arguments.encode())


class WholeMessage:
    """A Writer that sends the message once it is complete."""

    def __init__(self, client: WatchedClient[Message]) -> None:
        self._client = client

    def begin(self, prepared: PreparedRequest) -> None:
        self._builder = MessageBuilder(prepared)

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._builder.push(piece)

    async def finish(self, usage: Usage) -> None:
        self._builder.end(usage)
        await send_json(self._client, self._builder.message(usage))


class MessageStream:
    """A StreamWriter that sends the message as events; the first output starts the response."""

    def __init__(self, client: WatchedClient[Message]) -> None:
        self._client = client
        self._channel = EventChannel(client)

    def begin(self, prepared: PreparedRequest) -> None:
        self._builder = MessageBuilder(prepared)

    async def piece(self, index: int, piece: OutputPiece) -> None:
        events = [] if self._client.started else [self._builder.begin()]
        events += self._builder.push(piece)
        if events:
            await self._channel.send(b"".join(map(typed_event, events)))

    async def finish(self, usage: Usage) -> None:
        events = self._builder.end(usage)
        await self._channel.send(b"".join(map(typed_event, events)), last=True)

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        await self._channel.send_final(typed_event(error_body(error)), timeout_s)


def router(serving: RequestServing, pool: TextPool) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/messages")
    strict = serving.refuse_unknown
    described = partial(describe_body, error=SCHEMA)

    @routes.post(
        "",
        response_class=JSONResponse,
        openapi_extra=described(MessagesRequest, FIELDS.policy, FIELDS.passed_on),
    )
    async def messages(request: Request) -> Response:
        """Generate the assistant's next message."""
        parse = partial(parse_messages, refuse_unknown=strict)
        return GenerationResponse(serving, pool, request, MessagesDialect(parse))

    @routes.post(
        "/count_tokens", response_class=JSONResponse, openapi_extra=described(CountTokensRequest)
    )
    async def count_tokens(request: Request) -> Response:
        """Count the input tokens of a message."""

        async def compute(body: ChatRequest) -> tuple[Content, int]:
            record = record_of(request.scope)
            entry = serving.models.entry(body.model, record.principal)
            ids = await entry.preparer.token_ids(body, record)
            return lambda: {"input_tokens": len(ids)}, 1

        parse = partial(parse_count, refuse_unknown=strict)
        return ComputedResponse(serving, pool, request, parse, compute)

    return routes
