"""The JSON of Anthropic's Messages API, streamed and whole."""

from collections.abc import Callable
from typing import Any

from starlette.types import Message

from services.core.request import FinishReason
from services.gateway.api.requests import Generation
from services.gateway.client import Client
from services.gateway.errors import GatewayError
from services.gateway.http.dialect import StreamWriter, send_json
from services.gateway.http.messages_error import error_body
from services.gateway.http.sse import EventChannel, typed_event
from services.gateway.output import Piece, Usage
from services.gateway.prepared import PreparedRequest
from services.gateway.serving import Writer

Event = dict[str, Any]
_STOP_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


class MessagesDialect:
    """/v1/messages."""

    def __init__(self, parse: Callable[[dict[str, Any]], Generation]) -> None:
        self.parse = parse

    def whole(self, client: Client[Message], body: Generation) -> Writer:
        """See Dialect."""
        return WholeMessage(client)

    def stream(self, client: Client[Message], body: Generation) -> StreamWriter:
        """See Dialect."""
        return MessageStream(client)


class Answer:
    """The message so far, and the events that tell how it grows. Pure."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[list[str]] = []
        self._open = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self) -> Event:
        """The first event."""
        return {"type": "message_start", "message": self.message(0)}

    def push(self, piece: Piece) -> list[Event]:
        """The events of new output."""
        events = self._text(piece.text) if piece.text else []
        if piece.finish_reason is not None:
            self._stop_reason = _STOP_REASONS[piece.finish_reason]
            if isinstance(piece.stop_reason, str):
                self._stop_reason, self._stop_sequence = "stop_sequence", piece.stop_reason
        return events

    def end(self, output_tokens: int) -> list[Event]:
        """The last events, when all output has been pushed."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        usage = self._usage(output_tokens)
        return [
            *self._close(),
            {"type": "message_delta", "delta": delta, "usage": usage},
            {"type": "message_stop"},
        ]

    def message(self, output_tokens: int) -> dict[str, Any]:
        """The message as it is now."""
        return {
            "id": self._prepared.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model,
            "content": [
                block | {"text": "".join(texts)}
                for block, texts in zip(self._blocks, self._texts, strict=True)
            ],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(output_tokens),
        }

    def _text(self, text: str) -> list[Event]:
        events = []
        if not self._open:
            events.append(self._start({"type": "text", "text": ""}))
        self._texts[-1].append(text)
        delta = {"type": "text_delta", "text": text}
        events.append({"type": "content_block_delta", "index": self._index, "delta": delta})
        return events

    def _start(self, block: dict[str, Any]) -> Event:
        self._blocks.append(block)
        self._texts.append([])
        self._open = True
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": self._index}]

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _usage(self, output_tokens: int) -> dict[str, int]:
        return {
            "input_tokens": self._prepared.prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
        }


class WholeMessage:
    """Sends a message when it is complete."""

    def __init__(self, client: Client[Message]) -> None:
        self._client = client

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""
        self._answer = Answer(prepared)

    async def piece(self, index: int, piece: Piece) -> None:
        """See Writer."""
        self._answer.push(piece)

    async def finish(self, usage: Usage) -> None:
        """See Writer."""
        self._answer.end(usage.completion_tokens)
        await send_json(self._client, self._answer.message(usage.completion_tokens))


class MessageStream:
    """Sends a message in events; the first output starts the response."""

    def __init__(self, client: Client[Message]) -> None:
        self._client = client
        self._channel = EventChannel(client)

    def begin(self, prepared: PreparedRequest) -> None:
        """See Writer."""
        self._answer = Answer(prepared)

    async def piece(self, index: int, piece: Piece) -> None:
        """See Writer."""
        events = [] if self._client.started else [self._answer.begin()]
        events += self._answer.push(piece)
        if events:
            await self._channel.send(b"".join(map(typed_event, events)))

    async def finish(self, usage: Usage) -> None:
        """See Writer."""
        events = self._answer.end(usage.completion_tokens)
        await self._channel.send(b"".join(map(typed_event, events)), last=True)

    async def fail(self, error: GatewayError, timeout_s: float) -> None:
        """See StreamWriter."""
        await self._channel.send_farewell(typed_event(error_body(error)), timeout_s)
