"""The JSON of Anthropic's Messages API, streamed and whole."""

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
"""Key of arguments that are no JSON."""
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
    """/v1/messages; a Dialect."""

    def __init__(self, parse: Callable[[dict[str, Any]], GenerationRequest]) -> None:
        self.parse = parse
        self.kept_bytes = 0

    def whole(self, client: WatchedClient[Message], body: GenerationRequest) -> Writer:
        return WholeMessage(client)

    def stream(self, client: WatchedClient[Message], body: GenerationRequest) -> StreamWriter:
        return MessageStream(client)


class MessageBuilder:
    """The message so far, and the events that tell how it grows. Pure."""

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
        """The events of new output."""
        said, events = piece.said, list[Event]()
        if said.reasoning:
            events += self._grow("thinking", said.reasoning)
        if said.content:
            events += self._grow("text", said.content)
        for call in said.tool_calls:
            events += self._call(call)
        if said.finish_reason is not None:
            self._stop_reason = _STOP_REASONS[said.finish_reason]
            if isinstance(piece.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", piece.stop_reason
        return events

    def end(self, usage: Usage) -> list[Event]:
        """The last events, when all output has been pushed."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": _usage_body(usage)},
            {"type": "message_stop"},
        ]

    def message(self, usage: Usage) -> dict[str, Any]:
        """The message as it is now."""
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

    def _grow(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open is None or self._open.kind != kind:
            events += self._start(_ContentBlock(len(self._blocks), kind, _EMPTY[kind]))
        assert self._open is not None
        return [*events, self._open.grow(text)]

    def _call(self, delta: ToolCallDelta) -> list[Event]:
        events = []
        if delta.id:
            fields = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
            events += self._start(_ContentBlock(len(self._blocks), "tool_use", fields))
        assert self._open is not None, "a call goes on until it has ended"
        if delta.arguments:
            events.append(self._open.grow(delta.arguments))
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
    """Tokens that were read from a cache are none of the input tokens here."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


class _ContentBlock:
    """One block of a message: `empty` and the text, or the JSON, that came since."""

    def __init__(self, index: int, kind: str, empty: dict[str, Any]) -> None:
        self.index = index
        self.kind = kind
        self._empty = empty
        self._texts: list[str] = []

    def opening(self) -> Event:
        """The event of its beginning."""
        return {"type": "content_block_start", "index": self.index, "content_block": self._empty}

    def grow(self, text: str) -> Event:
        """The event of further text or JSON of the block."""
        self._texts.append(text)
        kind, field = _DELTAS[self.kind]
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}

    def whole(self) -> dict[str, Any]:
        """The block as it is."""
        text = "".join(self._texts)
        value = _input(text) if self.kind == "tool_use" else text
        return self._empty | {"input" if self.kind == "tool_use" else self.kind: value}


def _input(arguments: str) -> msgspec.Raw | dict[str, str]:
    """The arguments of a call as the model wrote them, in which numbers are not touched.

    Of a call that was cut short they are no JSON. Then they are text under the key that Anthropic's
    documentation of fine-grained tool streaming has for that.
    """
    if not arguments:
        return {}
    try:
        # Numbers may be longer than Python reads.
        json.loads(arguments, parse_int=str)
    except ValueError:
        return {INVALID_INPUT: arguments}
    return msgspec.Raw(arguments.encode())


class WholeMessage:
    """Sends a message when it is complete; a Writer."""

    def __init__(self, client: WatchedClient[Message]) -> None:
        self._client = client

    def begin(self, prepared: PreparedRequest) -> None:
        self._answer = MessageBuilder(prepared)

    async def piece(self, index: int, piece: OutputPiece) -> None:
        self._answer.push(piece)

    async def finish(self, usage: Usage) -> None:
        self._answer.end(usage)
        await send_json(self._client, self._answer.message(usage))


class MessageStream:
    """Sends a message in events; the first output starts the response; a StreamWriter."""

    def __init__(self, client: WatchedClient[Message]) -> None:
        self._client = client
        self._channel = EventChannel(client)

    def begin(self, prepared: PreparedRequest) -> None:
        self._answer = MessageBuilder(prepared)

    async def piece(self, index: int, piece: OutputPiece) -> None:
        events = [] if self._client.started else [self._answer.begin()]
        events += self._answer.push(piece)
        if events:
            await self._channel.send(b"".join(map(typed_event, events)))

    async def finish(self, usage: Usage) -> None:
        events = self._answer.end(usage)
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
        """The assistant's next message."""
        parse = partial(parse_messages, refuse_unknown=strict)
        return GenerationResponse(serving, pool, request, MessagesDialect(parse))

    @routes.post(
        "/count_tokens", response_class=JSONResponse, openapi_extra=described(CountTokensRequest)
    )
    async def count_tokens(request: Request) -> Response:
        """How many input tokens a message would have."""

        async def answer(body: ChatRequest) -> tuple[Content, int]:
            ids = await serving.preparer.token_ids(body, record_of(request.scope))
            return lambda: {"input_tokens": len(ids)}, 1

        parse = partial(parse_count, refuse_unknown=strict)
        return ComputedResponse(serving, pool, request, parse, answer)

    return routes
